"""Runs one attempt of a job in a worker, and reports its end to the driver."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rayrec.train.errors import describe, is_broken_device, is_retryable
from rayrec.train.run.log import Mailbox, sink_to
from rayrec.train.worker.lockstep import RankError, StopRequested
from rayrec.train.worker.loop import fit, score_checkpoint
from rayrec.train.worker.session import Job, Session, session_alone, session_on_ray, set_threads
from rayrec.train.worker.watch import Watch

TASKS: dict[str, Callable[[Job, Session], dict[str, Any]]] = {"fit": fit, "evaluate": score_checkpoint}
PEERS_FAIL_WITHIN_S = 1.0


def work_on_ray(job: Job, mailbox: Any) -> None:
    """Run one attempt in a Ray Train worker."""
    import ray.train

    context = ray.train.get_context()
    set_threads(job.config, context.get_local_world_size())
    sink, trainer = sink_to(mailbox), job.config.trainer
    rank, world_size = context.get_world_rank(), context.get_world_size()
    evaluates = trainer.evaluate == "background"
    with (
        Watch(sink, rank, world_size, hang_s=trainer.hang_s, evaluates=evaluates) as watch,
        _reporting_broken_device(sink, rank),
    ):
        received = trainer.collective_timeout_s, watch.stop_requested, watch.evaluated
        attempt(job, sink, rank, world_size, lambda: session_on_ray(sink, *received))


@contextmanager
def _reporting_broken_device(sink: Mailbox, rank: int) -> Iterator[None]:
    """Report this node if its GPU fails, so that the workers restart on other nodes."""
    try:
        yield
    except Exception as error:
        if is_broken_device(error):
            import ray
            import ray.util

            reason = describe(error).strip().splitlines()[0]
            message = (
                f"a GPU of node {ray.util.get_node_ip_address()} failed (worker {rank}: {reason}); "
                "workers restart without this node while the other nodes have room"
            )
            node = ray.get_runtime_context().get_node_id()
            sink.flush({"kind": "event", "event": "failed_node", "node": node, "rank": rank, "message": message})
        raise


def work_alone(job: Job, sink: Mailbox) -> None:
    """Run one attempt in this process, as the only rank. Reports a hang, but does not end the process."""
    set_threads(job.config, 1)
    with Watch(sink, 0, 1, hang_s=job.config.trainer.hang_s, end=None) as watch:
        attempt(job, sink, 0, 1, lambda: session_alone(sink, lambda: watch.stop_requested() or sink.stop_requested()))


def attempt(job: Job, sink: Mailbox, rank: int, world_size: int, join: Callable[[], Session]) -> None:
    """Train to the end, or report the error to the driver.

    Raises a transient error (a lost peer, a storage fault) to Ray, which restarts the worker group. Reports any other
    error to the driver. If all ranks fail, they return; otherwise this rank raises, so that Ray ends the ranks that
    wait for it, and `driver/failures.py` ends the run. If Ray starts another attempt nevertheless, it returns at once.
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


def _all_failed(sink: Mailbox, world_size: int) -> bool:
    end = time.monotonic() + PEERS_FAIL_WITHIN_S
    while sink.num_failed_ranks() < world_size:
        if time.monotonic() > end:
            return False
        time.sleep(0.1)
    return True
