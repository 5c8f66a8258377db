"""The train function that Ray Train's controller hands to its workers: light, as the controller imports it too."""

from __future__ import annotations

from typing import Any

from rayrec._runtime.imports import quick_imports


def start_worker(handed: dict[str, Any]) -> None:
    """`handed` has the `job` as bytes and the mailbox actor, `log`."""
    load()
    from ray import cloudpickle

    from rayrec.train.worker.entry import work_on_ray

    work_on_ray(cloudpickle.loads(handed["job"]), handed["log"])


def load() -> None:
    """Import what a worker needs, which it can do before there is a job."""
    with quick_imports():
        import torch._dynamo  # noqa: F401 - torch imports it when its first optimizer is made

        import rayrec.train.worker.entry  # noqa: F401
