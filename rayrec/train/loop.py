"""The loop of one rank: epochs of steps, with logging, checkpoints and evaluation. Every rank runs it in step."""

from __future__ import annotations

import time
from typing import Any

from rayrec.checkpoint import CheckpointStore
from rayrec.data import Cursor, empty_batch
from rayrec.distributed.comm import broadcast_object
from rayrec.train import build
from rayrec.train.control import Turn, due, in_step
from rayrec.train.errors import plain_errors
from rayrec.train.evaluation import evaluate, open_stream
from rayrec.train.learner import Learner, make_learner
from rayrec.train.position import START, Position
from rayrec.train.session import Job, Session
from rayrec.train.window import Window

PROGRESS_EVERY_S = 0.2


class Loop:
    """One rank's training, from the last committed checkpoint to the last epoch."""

    def __init__(self, job: Job, session: Session) -> None:
        self.job, self.session, self.config = job, session, job.config
        self.learner: Learner = make_learner(job, session)
        self.store = CheckpointStore(job.files.checkpoints)
        self.window = Window(session.device, session.control, session.group)
        self.saved_step: int | None = None
        self.saved_path: str | None = None
        self.figures: dict[str, float | None] = {}
        self.total_steps = 0
        self._told_at = 0.0

    def run(self) -> dict[str, Any]:
        """Train, and return what the driver needs for the result."""
        position = self.restore()
        self._tell_start()
        scores: dict[str, Any] | None = None
        last = self.config.trainer.epochs - 1
        while True:
            position = self._epoch(position)
            if position.epoch >= last and self.saved_step != position.step:
                self._save(position)
            if self.job.eval is not None and (position.epoch >= last or position.step not in self.job.evaluated_steps):
                scores = self._evaluate(position)
            if position.epoch >= last:
                return self._outcome(position, scores)
            position = position.next_epoch()

    def _epoch(self, position: Position) -> Position:
        """What the position's cursor leaves of its epoch."""
        session, cursor = self.session, position.cursor
        assert isinstance(cursor, Cursor)
        stream = session.control.together(
            lambda: open_stream(self.job.train, self.config, session, cursor, shuffle=True)
        )
        epochs_left = self.config.trainer.epochs - 1 - position.epoch
        per_epoch = -(-self.job.train.rows // self.config.trainer.batch_size)
        self.total_steps = position.step + stream.num_batches + epochs_left * per_epoch
        with stream:
            began = time.perf_counter()
            for turn in in_step(stream, empty_batch(self.config.data_schema), session.control):
                turn = turn.on(session.device)
                loss, logits = self.learner.step(turn.batch, turn.rows)
                seconds = time.perf_counter() - began
                position = position.after(turn.rows, seconds, turn.cursor)
                self._after_step(position, turn, loss, logits, seconds)
                began = time.perf_counter()
        if not self.window.empty:
            self._log(position)
        return position.merged(session.control)

    def _after_step(self, position: Position, turn: Turn, loss: Any, logits: Any, seconds: float) -> None:
        self.window.add(turn, loss, logits, seconds)
        if due(position.step, self.config.trainer.log_every):
            self._log(position)
        if due(position.step, self.config.trainer.checkpoint_every):
            if not self.window.empty:
                self._log(position)  # a loss that is not finite must not reach a checkpoint
            self._save(position.merged(self.session.control))
        self._tell_progress(position)

    def _log(self, position: Position) -> None:
        self.figures = self.window.close(position.step)
        optimizers = self.config.optimizers
        lr = {"dense": optimizers.dense.lr, "sparse": optimizers.sparse.lr}
        self._tell("train", position, **self.figures, lr=lr)

    def _evaluate(self, position: Position) -> dict[str, Any]:
        assert self.job.eval is not None
        scores = evaluate(self.learner, self.job.eval, self.config, self.session)
        self._tell("eval", position, **scores)
        return scores

    def _save(self, position: Position) -> None:
        """Write a checkpoint; `position` is that of all ranks."""
        extra = {
            "position": position.to_dict(),
            "config": self.config.to_dict(),
            "world_size": self.session.world_size,
        }
        learner, group = self.learner, self.session.control.group
        with plain_errors():
            checkpoint = self.store.save(position.step, learner.model, learner.optimizer, extra, group)
        self.saved_step, self.saved_path = position.step, str(checkpoint.path)
        if self.session.rank == 0:
            self.store.prune(self.config.storage.keep)
        self._tell("event", position, event="checkpoint", message=f"checkpoint of step {position.step} is complete")

    def restore(self) -> Position:
        """The last committed checkpoint, as rank 0 sees it, or the start."""
        latest = self.store.latest() if self.session.rank == 0 else None
        latest = broadcast_object(latest, self.session.control.group)
        if latest is None:
            return START
        with plain_errors():
            self.store.load(latest, self.learner.model, self.learner.optimizer, self.session.control.group)
        position = Position.from_dict(latest.extra["position"])
        self.saved_step, self.saved_path = position.step, str(latest.path)
        return position

    def _tell_start(self) -> None:
        if self.session.rank == 0:
            self.session.sink.put(
                {"kind": "begin", "resumed_step": self.saved_step, "world_size": self.session.world_size}
            )
            dense = sum(p.numel() for p in self.learner.model.dense_parameters().values())
            memory = build.plan_memory(self.learner.plan, self.config, self.session.world_size, dense)
            self.session.sink.put({"kind": "plan", "plan": {**self.learner.plan.to_dict(), "memory": memory}})

    def _tell_progress(self, position: Position) -> None:
        if time.monotonic() - self._told_at >= PROGRESS_EVERY_S:
            self._told_at = time.monotonic()
            self._tell("progress", position, epochs=self.config.trainer.epochs, total_steps=self.total_steps)

    def _tell(self, kind: str, position: Position, **values: Any) -> None:
        """Rank 0 tells the driver."""
        if self.session.rank == 0:
            at = {"step": position.step, "epoch": position.epoch}
            if kind == "train":
                at["samples"] = position.samples
            self.session.sink.put({"kind": kind, "time": time.time(), **at, **values})

    def _outcome(self, position: Position, scores: dict[str, Any] | None) -> dict[str, Any]:
        return {
            "eval": scores,
            "train": {
                "loss": self.figures.get("loss"),
                "ne": self.figures.get("ne"),
                "auc": self.figures.get("auc"),
                "samples": position.samples,
                "seconds": round(position.seconds, 3),
            },
            "world_size": self.session.world_size,
            "epochs": position.epoch + 1,
            "steps": position.step,
            "samples_per_second": position.samples / max(position.seconds, 1e-9),
            "checkpoint": self.saved_path,
        }


def score_checkpoint(job: Job, session: Session) -> dict[str, Any]:
    """Figures of the last committed checkpoint on the evaluation rows."""
    assert job.eval is not None
    loop = Loop(job, session)
    position = loop.restore()
    scores = evaluate(loop.learner, job.eval, job.config, session)
    return {**scores, "step": position.step, "checkpoint": loop.saved_path, "data": str(job.config.data.eval)}
