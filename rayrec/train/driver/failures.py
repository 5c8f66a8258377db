"""What Ray Train's controller does about a worker group that failed, and how failures are reported.

The controller is a process of its own: what is imported here is imported there, so it is little.
"""

from __future__ import annotations

import os
import re
from typing import Any

from rayrec.train.errors import TrainError, describe
from rayrec.train.run.log import ask

END_WAIT = "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"  # how long Ray Train waits for ranks that hang
FAILED_STARTS = 3  # of worker groups in a row, not for lack of room


def failure_reporter(actor: Any, max_failures: int) -> Any:
    """Tells the driver why a worker group failed, and ends the run where it would fail again or has failed too often
    without getting further; Ray calls it in its controller, which starts no new group after a callback has failed.

    A lost worker counts more than what other ranks report: their errors may come from its loss, and others come again.
    """
    from ray.train import UserCallback

    end_wait_s = os.environ.get(END_WAIT)

    class FailureReporter(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            if end_wait_s is not None:
                os.environ[END_WAIT] = end_wait_s  # a cluster's controller has not the driver's environment
            reason = ask(actor.last_words) or failure_reason(worker_exceptions)
            if (restart := ask(actor.restart_reason)) is not None:
                actor.put.remote({"kind": "restart", "reason": restart})
                return
            if ask(actor.stop_requested):
                raise TrainError(reason)
            dead = [rank for rank, error in worker_exceptions.items() if _death(error)]
            if ask(actor.failed_ranks) and not ask(actor.excuse, dead):
                raise TrainError(reason)
            failures = ask(actor.failed_again)
            if failures > max_failures:
                text = too_often(failures, max_failures, reason)
                ask(actor.put, {"kind": "fatal", "rank": 0, "error": text, "final": True})
                raise TrainError(text)
            actor.put.remote({"kind": "failure", "reason": reason})

    return FailureReporter()


def patient(policy: Any, actor: Any) -> Any:
    """Ray's failure policy without an end to waits for room; failed starts in a row end the run all the same.

    Args:
        policy: the one that Ray has made, without a limit of its own.
        actor: the mailbox; where the run has failed already, as it waited too long, no other wait begins.
    """
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
    from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy

    class Patient(FailurePolicy):
        def __init__(self) -> None:
            super().__init__(policy.failure_config)
            self._failed_starts = 0

        def make_decision(self, training_failed_error: Any) -> Any:
            failure = getattr(training_failed_error, "controller_failure", None)
            failed_start = isinstance(failure, WorkerGroupStartupFailedError)
            self._failed_starts = self._failed_starts + 1 if failed_start else 0
            if self._failed_starts > FAILED_STARTS or (failure is not None and ask(actor.failed_ranks)):
                return FailureDecision.RAISE
            return policy.make_decision(training_failed_error)

    return Patient()


def too_often(failures: int, max_failures: int, reason: str) -> str:
    """Why a run is given up."""
    times = "once" if failures == 1 else f"{failures} times"
    return (
        f"the workers failed {times} without a new checkpoint between, more often than "
        f"trainer.max_failures={max_failures} allows; the last time: {reason}"
    )


def failure_reason(failures: dict[int, Exception]) -> str:
    """One line for what happened to the workers, by rank: the lost ones, or else the errors of those that are left."""
    lost = {rank: text for rank, error in failures.items() if (text := _death(error))}
    if lost:
        return ", ".join(f"worker {rank} was lost: {text}" for rank, text in sorted(lost.items()))
    return ", ".join(f"worker {rank}: {line_of(describe(error))}" for rank, error in sorted(failures.items()))


def _death(error: Exception) -> str | None:
    """How a worker process ended, if that is what the error says."""
    from ray.exceptions import RayActorError

    cause = getattr(error, "health_check_failure", error)
    if not isinstance(cause, RayActorError):
        return None
    text = str(cause)
    if "SIGKILL" in text or "connection error code 2" in text:
        return "its process was killed (SIGKILL, or out of memory)"
    found = re.search(r"The actor (?:is dead because|died)[^.\n]*", text)
    return line_of(found.group(0) if found else text)


def line_of(text: str, limit: int = 200) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
