"""The event log of a run: workers send records (plain dicts) to a mailbox; the driver stores and displays them.

    worker     calls `put` of its sink: the `Mailbox` itself, or `sink_to` it if it is a Ray actor
    mailbox    numbers attempts, and knows which ranks have failed and what the driver has requested
    driver     `handling_records` takes new records in a thread and passes each to the `Recorder`
    state      `RunState` summarizes the records: current step and attempt, outcome
    files      `driver/recorder.py` appends lines to metrics.jsonl and TensorBoard
    display    `driver/console.py` prints them, `driver/trackers.py` exports them to Prometheus

Workers never wait for the driver. Kinds of records: begin, plan, progress, train, eval, event, evaluate (a checkpoint
to evaluate in the background), failure and restart (from Ray's controller), stopped, fatal, errors_discarded (fatal
records so far were caused by a lost worker), done.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

from rayrec._runtime.threads import call_every
from rayrec.train.config.difference import flat
from rayrec.train.errors import TrainError
from rayrec.train.tolerance import Tolerance

Record = dict[str, Any]
# Record fields that are not model metrics. Lookups per table are long; they are in metrics.jsonl only.
NOT_METRICS = frozenset({"kind", "step", "time", "attempt", "partial", "tables"})
Waiting = tuple[int, str]  # number of collectives that a rank has started, and the code location of its wait


class Mailbox:
    """Queues the records of workers for the driver. Runs as a Ray actor, or in the driver's process."""

    def __init__(self, previous_attempts: int = 0) -> None:
        self._records: deque[Record] = deque()  # without Ray, two threads share it
        self._attempt = previous_attempts
        self._failed_ranks: set[int] = set()
        self._waiting: dict[int, Waiting] = {}
        self._exit_reason: str | None = None
        self._stop = self._discards_errors = False
        self._restart: str | None = None
        self._saved_step = self._failures = 0
        self._failed_nodes: set[str] = set()
        self._idle_since: float | None = time.monotonic()
        self._outcomes: list[Record] = []

    def begin(self, leader: bool) -> bool:
        """Start an attempt. Every rank calls this; the leader increments the attempt number.

        Returns:
            Whether the run has already failed.
        """
        self._discards_errors, self._idle_since = False, None
        self._attempt += leader and not self._failed_ranks
        self._restart = None if leader else self._restart
        self._outcomes = [] if leader else self._outcomes  # the driver sends them again
        self._waiting.clear()
        self._exit_reason = None
        return bool(self._failed_ranks)

    def put(self, record: Record) -> None:
        """Add a record. Records of one rank stay in order."""
        if record["kind"] in ("failure", "restart"):
            self._idle_since = time.monotonic()
        elif record["kind"] in ("progress", "train"):  # a mailbox that replaces a lost one has seen no `begin`
            self._idle_since = None
        if record["kind"] == "fatal":
            if self._discards_errors and not record.get("final"):
                return
            self._failed_ranks.add(record["rank"])
        if record.get("event") == "checkpoint" and record["step"] > self._saved_step:
            self._saved_step, self._failures = record["step"], 0
        if record.get("event") in ("hang", "unlike"):
            self._exit_reason = record["message"]
        if record.get("event") == "failed_node":
            self._failed_nodes.add(record["node"])
        self._records.append({"time": time.time(), "attempt": self._attempt, **record})

    def flush(self, record: Record) -> None:
        """Add a record; returns when it and all earlier records have arrived."""
        self.put(record)

    def exit_reason(self) -> str | None:
        """Why a worker of this attempt ended its own process; None if none has."""
        return self._exit_reason

    def num_failed_ranks(self) -> int:
        """Number of ranks that sent a fatal record in this attempt."""
        return len(self._failed_ranks)

    def failed_nodes(self) -> list[str]:
        """Ids of the nodes on which a GPU failed, of all attempts."""
        return sorted(self._failed_nodes)

    def idle_s(self) -> float:
        """Seconds without a worker group; 0 while one runs."""
        return 0.0 if self._idle_since is None else time.monotonic() - self._idle_since

    def discard_errors(self, lost_ranks: Collection[int]) -> bool:
        """Discard the fatal errors of this attempt if a lost rank reported none: its loss may have caused the others.

        Returns:
            Whether the errors were discarded.
        """
        if self._failed_ranks.issuperset(lost_ranks):
            return False
        self._failed_ranks.clear()
        self._discards_errors = True
        self._records.append({"time": time.time(), "attempt": self._attempt, "kind": "errors_discarded"})
        return True

    def count_failure(self) -> int:
        """Count a failure of the worker group; returns the number of failures since the last new checkpoint."""
        self._failures += 1
        return self._failures

    def request_stop(self) -> None:
        self._stop = True

    def request_restart(self, reason: str) -> None:
        """Request that the workers save a checkpoint, stop, and are restarted."""
        self._restart = reason

    def stop_requested(self) -> bool:
        """Whether the workers should save a final checkpoint and stop."""
        return self._stop or self._restart is not None

    def restart_reason(self) -> str | None:
        """Why the workers are restarted after the stop; None if they are not."""
        return None if self._stop else self._restart

    def evaluated(self, outcome: Record) -> None:
        """Pass the outcome of a background evaluation to the workers of this attempt."""
        self._outcomes.append(outcome)

    def outcomes(self, after: int) -> list[Record]:
        """The outcomes of background evaluations in this attempt, without the first `after`."""
        return self._outcomes[after:]

    def report_waiting(self, rank: int, waiting: Waiting | None) -> None:
        """Report where a rank waits for others; None: it does not."""
        self._waiting.pop(rank, None)
        if waiting is not None:
            self._waiting[rank] = waiting

    def waiting_ranks(self) -> dict[int, Waiting]:
        """The reports of all waiting ranks."""
        return dict(self._waiting)

    def take(self, attempt: int = 0, stop: bool = False, restart: str | None = None) -> list[Record]:
        """All records since the last call.

        A mailbox that replaces a lost one knows neither the attempt nor earlier requests, so each call repeats them.

        Args:
            attempt: number of the current attempt according to the records so far.
            stop: whether a stop has been requested.
            restart: why a restart of this attempt has been requested; None if none has.
        """
        records = [self._records.popleft() for _ in range(len(self._records))]
        if attempt > self._attempt:
            self._attempt = attempt
            records = [{**record, "attempt": attempt} for record in records]
        self._stop = self._stop or stop
        if attempt == self._attempt:  # a later attempt is the restart
            self._restart = self._restart or restart
        return records


def call_actor(method: Any, *args: Any, **kwargs: Any) -> Any:
    """Call an actor method and wait up to 30 s for the result."""
    import ray

    return ray.get(method.remote(*args, **kwargs), timeout=30)


class _ActorSink:
    def __init__(self, actor: Any) -> None:
        self._actor = actor

    def put(self, record: Record) -> None:
        self._actor.put.remote(record)

    def flush(self, record: Record) -> None:
        call_actor(self._actor.put, record)

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return partial(call_actor, getattr(self._actor, name))


def sink_to(actor: Any) -> Mailbox:
    """A `Mailbox` interface to the mailbox actor. Every call except `put` waits for its result."""
    return cast(Mailbox, _ActorSink(actor))


@dataclass
class RunState:
    """The state of a job according to its records so far.

    Args:
        attempt, step: the latest ones.
        world_size, nodes: number of workers in the current attempt, and the Ray ids of their nodes; 0 and empty before
            the first attempt.
        failed_nodes: Ray ids of the nodes on which a GPU failed.
        fatal: the error that ended the job.
        done: the last record, with the outcome.
        stopped: the message of a job that stopped on request.
    """

    attempt: int = 0
    step: int = 0
    world_size: int = 0
    nodes: frozenset[str] = frozenset()
    failed_nodes: frozenset[str] = frozenset()
    fatal: str | None = None
    done: Record | None = None
    stopped: str | None = None

    def update(self, record: Record) -> None:
        self.attempt = max(self.attempt, record["attempt"])
        match record["kind"]:
            case "begin":
                self.step, self.world_size = record["resumed_step"] or 0, int(record["world_size"])
                self.nodes = frozenset(record.get("nodes", ()))
                return
            case "event" if record["event"] == "failed_node":
                self.failed_nodes |= {record["node"]}
            case "fatal":
                self.fatal = self.fatal or record["error"]
            case "errors_discarded":
                self.fatal = None
            case "stopped":
                self.stopped = record["message"] or "interrupted"
            case "done":
                self.done = record
        self.step = max(self.step, int(record.get("step") or 0))


def metrics_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Metrics of a train or eval record by path, for example `train/loss` and `eval/tasks/click/auc`."""
    metrics = flat({record["kind"]: {name: value for name, value in record.items() if name not in NOT_METRICS}}, "/")
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


@contextlib.contextmanager
def handling_records(
    take: Callable[[], list[Record]],
    handle: Callable[[Record], object],
    tolerance: Tolerance | None = None,
    every_s: float = 0.2,
    last_s: float = 120.0,
) -> Iterator[None]:
    """Pass new records to `handle` from a thread while the body runs, and the remaining ones at its end.

    A failed `take` is retried after `every_s`, because a busy machine must not end a run; the final one for `last_s`,
    because the last records hold the result. An error in `handle`, including SystemExit, only drops that record.

    Raises:
        TrainError: the final `take` failed; raised after the body.
    """
    tolerance = tolerance or Tolerance()

    def drain(last: bool = False) -> None:
        for record in take():
            try:
                handle(record)
            except BaseException as error:
                if last and isinstance(error, KeyboardInterrupt):
                    raise
                tolerance.report(error)

    try:
        with call_every(drain, every_s, "rayrec-run-log", end_s=30):
            yield
    except BaseException:
        with contextlib.suppress(Exception):  # the error of the body says more
            drain(last=True)
        raise
    deadline = time.monotonic() + last_s
    while True:
        try:
            return drain(last=True)
        except Exception as error:
            if time.monotonic() >= deadline:
                raise TrainError(
                    "the last records of the run could not be read from its mailbox "
                    f"({type(error).__name__}: {error}); run the same command again to resume from the last checkpoint"
                ) from error
            time.sleep(every_s)
