"""Decides in Ray Train's controller whether a failed worker group restarts, and describes failures.

On a cluster the controller is a separate process that imports this file, so keep its imports few.
"""

from __future__ import annotations

import os
import re
from typing import Any

from rayrec._runtime.ranks import ranks_text
from rayrec._runtime.ray_internals import is_failed_start
from rayrec.train.errors import TrainError, describe
from rayrec.train.run.log import call_actor

SHUTDOWN_TIMEOUT = "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S"  # how long Ray Train waits for hung ranks
MAX_REASONS = 4  # different errors in one line
MAX_FAILED_STARTS = 3  # in a row; a lack of resources does not count


def failure_reporter(mailbox: Any, max_failures: int) -> Any:
    """A `ray.train.UserCallback` that reports to the driver why a worker group failed.

    It raises, which ends the run, if the error is permanent or the group has failed too often without a new checkpoint.
    If a worker was lost, errors of other ranks are ignored: they may follow from the loss; if not, they occur again.
    If the mailbox does not answer, the group restarts, up to `max_failures` times in a row.
    """
    from ray.exceptions import RayError
    from ray.train import UserCallback

    # In a cluster the controller does not inherit the driver's environment.
    shutdown_timeout_s = os.environ.get(SHUTDOWN_TIMEOUT)

    class FailureReporter(UserCallback):
        _unanswered = 0

        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            if shutdown_timeout_s is not None:
                os.environ[SHUTDOWN_TIMEOUT] = shutdown_timeout_s
            try:
                self._report(worker_exceptions)
            except RayError as error:
                # Ray Train ends a run whose callback raises, and a busy head node is no reason to end it.
                self._unanswered += 1
                if self._unanswered > max_failures:
                    text = too_often(self._unanswered, max_failures, failure_reason(worker_exceptions))
                    raise TrainError(text) from error
            else:
                self._unanswered = 0

        def _report(self, worker_exceptions: dict[int, Exception]) -> None:
            reason = call_actor(mailbox.exit_reason) or failure_reason(worker_exceptions)
            if (restart := call_actor(mailbox.restart_reason)) is not None:
                mailbox.put.remote({"kind": "restart", "reason": restart})
                return
            if call_actor(mailbox.stop_requested):
                raise TrainError(reason)
            lost_ranks = [rank for rank, error in worker_exceptions.items() if _cause_of_death(error)]
            if call_actor(mailbox.num_failed_ranks) and not call_actor(mailbox.discard_errors, lost_ranks):
                raise TrainError(reason)
            failures = call_actor(mailbox.count_failure)
            if failures > max_failures:
                text = too_often(failures, max_failures, reason)
                call_actor(mailbox.put, {"kind": "fatal", "rank": 0, "error": text, "final": True})
                raise TrainError(text)
            mailbox.put.remote({"kind": "failure", "reason": reason})

    return FailureReporter()


class RestartLimit:
    """Decides when Ray Train stops restarting a run: after too many failed starts in a row, or if the run has failed
    while it waited for resources. Does not limit the wait itself.

    Args:
        mailbox: counts the failed ranks.
    """

    def __init__(self, mailbox: Any) -> None:
        self._mailbox = mailbox
        self._failed_starts = 0

    def __call__(self, failure: Exception | None) -> bool:
        """Whether to give up.

        Args:
            failure: error of Ray Train's controller; None if workers failed.
        """
        self._failed_starts = self._failed_starts + 1 if is_failed_start(failure) else 0
        if self._failed_starts > MAX_FAILED_STARTS:
            return True
        return failure is not None and self._has_failed()

    def _has_failed(self) -> bool:
        """Whether a rank reported a permanent error; False if the mailbox does not answer."""
        from ray.exceptions import RayError

        try:
            return int(call_actor(self._mailbox.num_failed_ranks)) > 0
        except RayError:
            return False


def too_often(failures: int, max_failures: int, reason: str) -> str:
    """The error message of a run that failed too often."""
    times = "once" if failures == 1 else f"{failures} times"
    return (
        f"The workers failed {times} without a new checkpoint in between; trainer.max_failures={max_failures} is the "
        f"limit. Last failure: {reason}"
    )


def failure_reason(failures: dict[int, Exception]) -> str:
    """One line with the errors of workers, by rank: only of lost workers if there are any.

    Workers with equal errors are listed together; of more than `MAX_REASONS` different errors the first are listed.
    """
    lost = {rank: text for rank, error in failures.items() if (text := _cause_of_death(error))}
    texts = lost or {rank: line_of(describe(error)) for rank, error in failures.items()}
    ranks_by_text: dict[str, list[int]] = {}
    for rank, text in sorted(texts.items()):
        ranks_by_text.setdefault(text, []).append(rank)
    reasons = []
    for text, ranks in list(ranks_by_text.items())[:MAX_REASONS]:
        was_lost = "" if not lost else " was lost" if len(ranks) == 1 else " were lost"
        reasons.append(f"worker{'' if len(ranks) == 1 else 's'} {ranks_text(ranks)}{was_lost}: {text}")
    if (others := sum(map(len, list(ranks_by_text.values())[MAX_REASONS:]))) > 0:
        reasons.append(f"and {others} more with other errors")
    return ", ".join(reasons)


def _cause_of_death(error: Exception) -> str | None:
    """How a worker process ended; None if the worker was not lost."""
    from ray.exceptions import RayActorError

    cause = getattr(error, "health_check_failure", error)
    if not isinstance(cause, RayActorError):
        return None
    text = str(cause)
    if "SIGKILL" in text or "connection error code 2" in text:
        return "its process was killed (SIGKILL, or out of memory)"
    match = re.search(r"The actor (?:is dead because|died)[^.\n]*", text)
    return line_of(match.group(0) if match else text)


def line_of(text: str, limit: int = 200) -> str:
    """The first line of a text that is not empty, cut to `limit` characters."""
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"
