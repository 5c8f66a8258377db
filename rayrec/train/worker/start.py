"""The train function that Ray Train calls in each worker.

Ray Train's controller imports this file too, so keep its imports few.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rayrec._runtime.imports import quick_imports

JOB_CHECK_S = 0.05


def start_worker(handed: dict[str, Any]) -> None:
    """Run a job in this worker.

    Args:
        handed: `train_loop_config`: `job`, a pickled `Job`, or the file in which it will be, empty if there is none;
            `log`, the mailbox actor.
    """
    import_worker()
    from ray import cloudpickle

    from rayrec.train.worker.entry import work_on_ray

    job: bytes | Path = handed["job"]
    if isinstance(job, Path):
        job = await_job(job)
    if job:
        work_on_ray(cloudpickle.loads(job), handed["log"])


def await_job(file: Path) -> bytes:
    """The content of a file, once there is one; ends with Ray, which is local."""
    while not file.exists():
        time.sleep(JOB_CHECK_S)
    return file.read_bytes()


def import_worker() -> None:
    """Import the modules of a worker."""
    with quick_imports():
        # torch imports this module when the first optimizer is created.
        import torch._dynamo  # noqa: F401

        import rayrec.train.worker.entry  # noqa: F401
