"""The position of a run, which every checkpoint stores besides weights and optimizer state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from rayrec.data import Cursor
from rayrec.data.order.periods import Periods
from rayrec.data.source.partitions import Value
from rayrec.train.worker.guards import Best
from rayrec.train.worker.lockstep import Control, StepInput
from rayrec.train.worker.plateau import Plateau


@dataclass(frozen=True, slots=True, kw_only=True)
class Position:
    """A point between two steps.

    Args:
        step: number of steps so far.
        samples: rows trained on, over all ranks and epochs.
        skipped: unusable rows of all ranks and epochs, without rows since the cursor's stream was opened.
        seconds: time spent on steps, by this rank's clock.
        elapsed_s: time since training began, with evaluations and checkpoints, summed over attempts, by rank 0's clock.
        wait_s: the part of `seconds` in which some rank waited for rows.
        cursor: rows of the epoch that have been read: by this rank within an epoch, by all ranks in a checkpoint.
        best: the best evaluation so far.
        plateau: reductions of the learning rates by `optimizers.plateau`.
        counted: step of the last evaluation that `best` and `plateau` include.
        interrupted: a stop interrupted an evaluation of this step that would have counted.
        halvings: number of times that the learning rates were halved after a non-finite loss.
        trained: periods before the cursor's, in progressive training.
    """

    step: int
    samples: int
    skipped: int = 0
    seconds: float
    wait_s: float
    cursor: Cursor
    best: Best = field(default_factory=Best)
    plateau: Plateau = field(default_factory=Plateau)
    counted: int = -1
    interrupted: bool = False
    halvings: int = 0
    trained: tuple[Value, ...] = ()
    elapsed_s: float = 0.0

    @property
    def epoch(self) -> int:
        return self.cursor.epoch

    def after(self, step: StepInput, seconds: float, elapsed_s: float) -> Position:
        """The position one step later.

        Args:
            seconds: time of the step.
            elapsed_s: `elapsed_s` of the later position.
        """
        return replace(
            self,
            step=self.step + 1,
            samples=self.samples + step.rows,
            seconds=self.seconds + seconds,
            elapsed_s=elapsed_s,
            interrupted=False,
            wait_s=self.wait_s + step.wait_s,
            cursor=step.cursor,
        )

    def merged(self, control: Control) -> Position:
        """The merged position of all ranks. A collective."""
        cursor = control.merged(self.cursor, lambda one, other: Cursor.merge((one, other)))
        return replace(self, cursor=replace(cursor, skipped=0), skipped=self.skipped + cursor.skipped)

    def next_epoch(self, periods: Periods | None = None) -> Position:
        """The start of the next epoch, in progressive training with the next period.

        Raises:
            DataError: no period is left.
        """
        period = self.cursor.only
        if periods is None or period is None:
            return replace(self, cursor=Cursor.start(self.epoch + 1))
        cursor = Cursor.start(self.epoch + 1, periods.next(period[1]))
        return replace(self, cursor=cursor, trained=(*self.trained, period[1]))

    def among(self, periods: Periods | None) -> Position:
        """The position within the periods that exist now. Moves to the next period if filters exclude the current one.

        Raises:
            DataError: see `Periods.continues` and `next`.
        """
        if periods is None:
            return replace(self, cursor=replace(self.cursor, only=None))
        if self.cursor.only is None:
            fresh = not (self.epoch or self.cursor.parts)
            only = periods.next(None) if fresh else periods.numbered(self.epoch)
            return replace(self, cursor=replace(self.cursor, only=only), trained=periods.values[: self.epoch]).among(
                periods
            )
        return self if periods.continues(self.cursor.only, self.cursor.over) else self.next_epoch(periods)

    def to_dict(self) -> dict[str, Any]:
        """JSON values that `from_dict` reads."""
        nested = {name: getattr(self, name).to_dict() for name in ("cursor", "best", "plateau")}
        return {f.name: getattr(self, f.name) for f in fields(self)} | nested | {"trained": list(self.trained)}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Position:
        values = {f.name: raw[f.name] for f in fields(cls) if f.name in raw}
        values |= {"cursor": Cursor.from_dict(raw["cursor"]), "best": Best.from_dict(raw.get("best"))}
        values["plateau"] = Plateau.from_dict(raw.get("plateau"))
        trained = (tuple(value) if isinstance(value, list) else value for value in raw.get("trained", ()))
        return cls(**values | {"trained": tuple(trained)})


START = Position(step=0, samples=0, seconds=0.0, wait_s=0.0, cursor=Cursor.start(0))
