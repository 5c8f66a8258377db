"""Sends metrics, progress, events and skipped rows of a run to the driver. Only rank 0 sends."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from rayrec.checkpoint import Checkpoint
from rayrec.train.setup import build
from rayrec.train.worker.learner import Learner
from rayrec.train.worker.lockstep import RankError
from rayrec.train.worker.machine import planned_for
from rayrec.train.worker.position import START, Position
from rayrec.train.worker.session import Job, Session
from rayrec.train.worker.streams import SkippedRows, Stream

PROGRESS_EVERY_S = 0.2


class Reporter:
    """Sends records to the driver.

    Attributes:
        position: current position of this rank; events are reported at this position.
    """

    def __init__(self, job: Job, session: Session) -> None:
        self._job, self._session = job, session
        self.position = START
        self._skipped: SkippedRows | None = None
        self._progress_at = 0.0

    def record(self, kind: str, position: Position, **values: Any) -> None:
        """Send a record of `kind` with its position and time."""
        if self._session.rank == 0:
            common: dict[str, Any] = {"step": position.step, "epoch": position.epoch}
            if kind == "train":
                common |= {"samples": position.samples, **self._job.window(position.cursor)}
            self._session.sink.put({"kind": kind, "time": time.time(), **common, **values})

    def event(self, event: str, message: str, step: int | None = None) -> None:
        """Send an event.

        Args:
            step: step of the event; default: the current one.
        """
        position = self.position if step is None else replace(self.position, step=step)
        self.record("event", position, event=event, message=message)

    def begin(self, resumed: Checkpoint | None, learner: Learner) -> None:
        """Send the start and the plan of an attempt."""
        session = self._session
        if session.rank == 0:
            nodes = sorted({machine.node for machine in session.machines})
            step = None if resumed is None else resumed.step
            start = {"kind": "begin", "resumed_step": step, "world_size": session.world_size, "nodes": nodes}
            session.sink.put(start)
            session.sink.put({"kind": "plan", "plan": self._plan(learner)})

    def _plan(self, learner: Learner) -> dict[str, Any]:
        config, machines, decision = self._job.config, self._session.machines, learner.decision
        plan, layout = decision.plan, decision.layout
        dense = sum(parameter.numel() for parameter in learner.model.other_parameters().values())
        return {
            **plan.to_dict(),
            "memory": build.plan_memory(plan, config, layout.group_size, dense),
            "time": build.plan_time(decision.estimate),
            "planned_for": planned_for(plan, machines, self._job.calibration, layout),
            **decision.plan_entry(config.sharding.sync_every),
        }

    def periods(self, resumed: Checkpoint | None) -> None:
        """Send the periods of progressive training: those trained on and the current one."""
        cursor = self.position.cursor
        if self._job.periods is None or cursor.only is None:
            return
        text = self._job.periods.report(cursor.only, self.position.trained)
        if resumed is not None and "only" not in resumed.extra["position"]["cursor"]:
            text = f"{text} (by its number: an earlier rayrec's checkpoint)"
        self.event("periods", text)

    def progress(self, total_steps: int) -> None:
        """Send the current step, at most every 0.2 s.

        Args:
            total_steps: expected until the end of the run.
        """
        if time.monotonic() - self._progress_at >= PROGRESS_EVERY_S:
            self._progress_at = time.monotonic()
            epochs = max(self._job.config.trainer.epochs, self.position.epoch + 1)
            self.record("progress", self.position, epochs=epochs, total_steps=total_steps)

    @contextmanager
    def watching(self, stream: Stream, purpose: str) -> Iterator[None]:
        """Report the skipped rows of a stream at the end of the body, also if too many of them end it. A collective.

        Args:
            purpose: use of the rows: "training" or "evaluation".
        """
        outer, skipped = self._skipped, SkippedRows(stream, self._session.control, purpose)
        self._skipped = skipped
        try:
            yield
        except RankError:
            self.skipped_rows()
            raise
        finally:
            self._skipped = outer
        self._report_skipped(skipped)

    def skipped_rows(self) -> None:
        """Report the rows that the innermost watched stream has skipped since the last report. A collective."""
        if self._skipped is not None:
            self._report_skipped(self._skipped)

    def _report_skipped(self, skipped: SkippedRows) -> None:
        event = skipped.event(self.position.epoch)
        if event is not None:
            self.record("event", self.position, **event)
