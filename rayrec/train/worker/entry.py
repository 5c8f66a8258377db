"""What runs in a worker: one attempt of a job, and how its end is told to the driver."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

from rayrec.train.errors import describe, is_retryable
from rayrec.train.run_log import ActorSink, Sink
from rayrec.train.worker.lockstep import RankError, StopRequested
from rayrec.train.worker.loop import fit, score_checkpoint
from rayrec.train.worker.session import Job, Session, session_alone, session_on_ray, set_threads
from rayrec.train.worker.watch import Watch

TASKS: dict[str, Callable[[Job, Session], dict[str, Any]]] = {"fit": fit, "evaluate": score_checkpoint}
PEERS_FAIL_WITHIN_S = 1.0


def work_on_ray(job: Job, mailbox: Any) -> None:
    """One attempt in a Ray Train worker."""
    import ray.train

    context = ray.train.get_context()
    set_threads(job.config, context.get_local_world_size())
    sink, trainer = ActorSink(mailbox), job.config.trainer
    rank, world_size = context.get_world_rank(), context.get_world_size()
    with Watch(sink, rank, world_size, hang_s=trainer.hang_s) as watch:
        attempt(job, sink, rank, world_size, lambda: session_on_ray(sink, trainer.timeout_s, watch.stop_asked))


def work_alone(job: Job, sink: Sink) -> None:
    """The same in this process, for a world of one; a hang is only told."""
    set_threads(job.config, 1)
    with Watch(sink, 0, 1, hang_s=job.config.trainer.hang_s, end=None) as watch:
        attempt(job, sink, 0, 1, lambda: session_alone(sink, lambda: watch.stop_asked() or sink.stop_asked()))


def attempt(job: Job, sink: Sink, rank: int, world_size: int, join: Callable[[], Session]) -> None:
    """Train to the end, or tell the driver why not.

    An error that another attempt may not meet (a lost peer, a fault of storage) goes up to Ray, which starts the group
    anew. Any other is told first; where all ranks have one, they just end, and otherwise Ray ends those that wait for
    this one, and the run (`launch.py`). Should Ray make another attempt all the same, it ends at once.
    """
    if sink.begin(leader=rank == 0):
        return
    try:
        outcome = TASKS[job.task](job, join())
    except StopRequested as stopped:
        if rank == 0:
            sink.flush({"kind": "stopped", "message": str(stopped)})
        return
    except RankError as error:
        if error.retry:
            raise
        if rank == 0:
            sink.flush(_fatal(error, rank))
        return
    except Exception as error:
        if is_retryable(error):
            raise
        sink.flush(_fatal(error, rank))
        if _all_failed(sink, world_size):
            return
        raise
    if rank == 0:
        sink.flush({"kind": "done", "outcome": outcome})


def _fatal(error: BaseException, rank: int) -> dict[str, Any]:
    text = "".join(traceback.format_exception(error))
    return {"kind": "fatal", "rank": rank, "error": describe(error), "traceback": text}


def _all_failed(sink: Sink, world_size: int) -> bool:
    until = time.monotonic() + PEERS_FAIL_WITHIN_S
    while sink.failed_ranks() < world_size:
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
    return True
