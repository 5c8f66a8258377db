"""The train function that Ray Train calls in each worker.

On a cluster Ray Train's controller imports this file too, so keep its imports few.
"""

from __future__ import annotations

from typing import Any

from rayrec._runtime.imports import quick_imports


def start_worker(handed: dict[str, Any]) -> None:
    """Run a job in this worker.

    Args:
        handed: `train_loop_config`: `job`, a pickled `Job`; `log`, the mailbox actor.
    """
    import_worker()
    from ray import cloudpickle

    from rayrec.train.worker.entry import work_on_ray

    work_on_ray(cloudpickle.loads(handed["job"]), handed["log"])


def import_worker() -> None:
    """Import the modules of a worker."""
    with quick_imports():
        # torch imports this module when the first optimizer is created.
        import torch._dynamo  # noqa: F401

        import rayrec.train.worker.entry  # noqa: F401
