"""The train function that Ray Train calls in each worker. Ray Train's controller imports this file too, so it imports
little."""

from __future__ import annotations

from typing import Any

from rayrec._runtime.imports import quick_imports


def start_worker(handed: dict[str, Any]) -> None:
    """Work on a job.

    Args:
        handed: `job`, as bytes; `log`, the mailbox actor.
    """
    import_worker()
    from ray import cloudpickle

    from rayrec.train.worker.entry import work_on_ray

    work_on_ray(cloudpickle.loads(handed["job"]), handed["log"])


def import_worker() -> None:
    """Import what a worker needs."""
    with quick_imports():
        # torch imports it when the first optimizer is made.
        import torch._dynamo  # noqa: F401

        import rayrec.train.worker.entry  # noqa: F401
