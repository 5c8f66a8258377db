"""Background evaluations of a run, from the side of the workers: requests to the driver, and what comes back."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rayrec.train.run.log import Record
from rayrec.train.worker.lockstep import StopRequested
from rayrec.train.worker.position import Position
from rayrec.train.worker.reporter import Reporter
from rayrec.train.worker.saver import Saver
from rayrec.train.worker.session import Session

POLL_S = 0.2
REQUEST = ("step", "epoch", "checkpoint", "max_rows")

Key = tuple[str, int | None]


def key_of(record: Record) -> Key:
    """What identifies an evaluation in requests and outcomes: the checkpoint and the number of rows."""
    return record["checkpoint"], record["max_rows"]


class BackgroundEvaluations:
    """Requests evaluations of checkpoints, and receives their outcomes.

    The driver runs the evaluations, see `driver/evaluations.py`. Only rank 0 knows which are pending.

    Args:
        patience_s: at the end of the run, the longest wait for the next outcome.
    """

    def __init__(self, session: Session, saver: Saver, reporter: Reporter, patience_s: float) -> None:
        self._session, self._saver, self._reporter, self._patience_s = session, saver, reporter, patience_s
        self._unsaved: dict[int, list[Record]] = {}  # requests by step, until their checkpoints are complete
        self._pending: dict[Key, Record] = {}
        saver.on_ended, saver.pending_evaluations = self._checkpoint_ended, self._unanswered

    def request(self, position: Position, max_rows: int | None) -> None:
        """Request the evaluation of the checkpoint of a position, which is complete or being written.

        Args:
            max_rows: approximate number of rows to read; None: all.
        """
        if self._session.rank != 0:
            return
        step, name = position.step, self._saver.name_of(position.step)
        if name is None:
            self._event("eval_skipped", f"Step {step} is not evaluated: it has no checkpoint.", step)
            return
        request = {"step": step, "epoch": position.epoch, "checkpoint": name, "max_rows": max_rows}
        self._saver.hold(name)
        if self._saver.is_complete(step):
            self._send(request)
        else:
            self._unsaved.setdefault(step, []).append(request)

    def resume(self, requests: Sequence[Record]) -> None:
        """Request again what was pending when the checkpoint to resume from was saved, maybe by an earlier launch.

        Evaluations of checkpoints that no longer exist are left out.
        """
        for request in requests if self._session.rank == 0 else ():
            if self._saver.existed(request["checkpoint"]):
                self._saver.hold(request["checkpoint"])
                self._send(request)  # a driver that knows it does not evaluate it again

    def _unanswered(self) -> list[Record]:
        """Requests whose outcomes are not in the position, oldest first."""
        unsaved = [request for requests in self._unsaved.values() for request in requests]
        return sorted([*self._pending.values(), *unsaved], key=lambda request: request["step"])

    def _checkpoint_ended(self, step: int, complete: bool) -> None:
        for request in self._unsaved.pop(step, []):
            if complete:
                self._send(request)
            else:
                self._saver.release(request["checkpoint"])
                self._event("eval_skipped", f"Step {step} is not evaluated: its checkpoint failed.", step)

    def _send(self, request: Record) -> None:
        self._pending[key_of(request)] = request
        self._session.sink.put({"kind": "evaluate", **request})

    def take(self) -> list[Record]:
        """The outcomes since the last call, the same on every rank. A collective."""
        return self._session.control.gather(self._arrived())[0]

    def _arrived(self) -> list[Record]:
        """Outcomes at this rank. A pending evaluation of an earlier attempt is noted, and its checkpoint kept."""
        arrived, received = [], self._session.evaluated
        while received:
            outcome = received.popleft()
            if outcome.get("pending"):
                self._pending[key_of(outcome)] = {name: outcome[name] for name in REQUEST}
                self._saver.hold(outcome["checkpoint"])
            else:
                self._pending.pop(key_of(outcome), None)
                arrived.append(outcome)
        return arrived

    def release(self, name: str) -> None:
        """No longer keep a checkpoint whose evaluation has been used, unless another of it is pending."""
        if self._session.rank == 0 and all(checkpoint != name for checkpoint, _ in self._pending):
            self._saver.release(name)

    def remaining(self) -> Iterator[list[Record]]:
        """Wait for the pending evaluations; yields their outcomes, the same on every rank. A collective.

        Ends without the rest if no outcome arrives for `patience_s`, and reports which are missing.

        Raises:
            StopRequested: the run stops.
        """
        control, since = self._session.control, time.monotonic()
        while True:
            arrived = self._arrived()
            since = time.monotonic() if arrived else since
            overdue = time.monotonic() - since > self._patience_s
            ranks = control.gather((arrived, bool(self._pending), overdue, control.stop_requested()))
            if any(stop for *_, stop in ranks):
                raise StopRequested
            outcomes, is_pending, overdue, _ = ranks[0]
            if outcomes:
                yield outcomes
            if not is_pending or overdue:
                self._report_missing()
                return
            time.sleep(POLL_S)

    def _report_missing(self) -> None:
        for step in (request["step"] for request in self._pending.values()):
            text = (
                f"The evaluation of step {step} is missing: the run waited {self._patience_s:g} s for it "
                f"(trainer.hang_s). Evaluate the checkpoint with `rayrec evaluate --checkpoint {step}`."
            )
            self._event("eval_missing", text, step)

    def _event(self, event: str, message: str, step: int) -> None:
        self._reporter.event(event, message, step)
