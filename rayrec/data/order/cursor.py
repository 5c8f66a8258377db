"""`Cursor`: the position of a run in an epoch, exact and independent of the number of ranks.

`epoch_planner.py` recomputes from it which rank had which sample ranges. Checkpoints store cursors.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rayrec.data.order.intervals import Intervals, count
from rayrec.data.order.periods import Only
from rayrec.storage.errors import DataError

# Raise it if the order of rows in an epoch changes.
CURSOR_VERSION = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a data set has been read in an epoch.

    Args:
        data: fingerprint of the data set and its order.
        world_size: number of ranks among which it was divided.
        total: rows of the epoch's sequence.
        before: sample ranges that were done when it was divided.
        rows: rows of its share that each rank has done since; ranks that are not listed have done none.
        step_rows: rows of a global batch, if global batches are contiguous ranges of the sequence.
    """

    data: str
    world_size: int
    total: int
    before: Intervals = ()
    rows: tuple[tuple[int, int], ...] = ()
    step_rows: int | None = None

    @property
    def rows_done(self) -> int:
        return count(self.before) + sum(rows for _, rows in self.rows)

    @property
    def over(self) -> bool:
        """True if it has been read completely."""
        return self.rows_done >= self.total

    def rows_of(self, rank: int) -> int:
        """Rows of its share that a rank has done."""
        return dict(self.rows).get(rank, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """The position in an epoch: of one rank in a stream, of all ranks in a checkpoint.

    Args:
        epoch: from 0.
        parts: progress per data set; empty at the start of an epoch.
        given: in a mix, rows that all ranks together have received in this epoch.
        skipped: bad rows skipped since the stream was opened; not stored in checkpoints.
        only: the period: a partition column and the value that the epoch reads.
    """

    epoch: int
    parts: tuple[Progress, ...] = ()
    given: int = 0
    skipped: int = 0
    only: Only | None = None

    @classmethod
    def start(cls, epoch: int, only: Only | None = None) -> Cursor:
        """The start of an epoch."""
        return cls(epoch=epoch, only=only)

    @property
    def rows_done(self) -> int:
        """Rows done in all data sets."""
        return sum(progress.rows_done for progress in self.parts)

    @property
    def over(self) -> bool:
        """True if the epoch has been read completely."""
        return bool(self.parts) and all(progress.over for progress in self.parts)

    def split(self, parts: int) -> list[Cursor]:
        """The cursors of the single data sets.

        Raises:
            DataError: the number of data sets has changed.
        """
        if not self.parts:
            return [Cursor.start(self.epoch)] * parts
        if len(self.parts) != parts:
            raise DataError(
                "the checkpoint's cursor does not fit the data: the number of data sets changed",
                fix="restore the original data config, or start a new run under another name",
            )
        return [Cursor(epoch=self.epoch, parts=(progress,)) for progress in self.parts]

    @staticmethod
    def join(cursors: Sequence[Cursor], given: int) -> Cursor:
        """Joins the cursors of several data sets."""
        return Cursor(
            epoch=cursors[0].epoch,
            parts=tuple(progress for cursor in cursors for progress in cursor.parts),
            given=given,
            skipped=sum(cursor.skipped for cursor in cursors),
        )

    @staticmethod
    def merge(cursors: Iterable[Cursor]) -> Cursor:
        """Merges the cursors of all ranks.

        Raises:
            ValueError: no cursors, or cursors of different epochs, data sets or divisions among ranks.
        """
        states = list(cursors)
        if not states:
            raise ValueError("Cursor.merge needs the cursor of at least one rank")
        if len({state.epoch for state in states}) > 1:
            raise ValueError(f"Cursor.merge: the ranks' cursors differ in epoch: {[state.epoch for state in states]}")
        started = [state for state in states if state.parts] or states[:1]
        progress = [_merged(same) for same in zip(*(state.parts for state in started), strict=True)]
        rows_given, skipped = max(state.given for state in states), sum(state.skipped for state in states)
        return replace(states[0], parts=tuple(progress), given=rows_given, skipped=skipped)

    def to_dict(self) -> dict[str, Any]:
        """JSON values for `from_dict`."""
        progress = [asdict(item) for item in self.parts]
        only = {} if self.only is None else {"only": list(self.only)}
        return {"version": CURSOR_VERSION, "epoch": self.epoch, "parts": progress, "given": self.given, **only}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cursor:
        """Restores a cursor from `to_dict`.

        Raises:
            ValueError: an unsupported version, or a malformed cursor.
        """
        if data.get("version") != CURSOR_VERSION:
            version = data.get("version")
            raise ValueError(f"data cursor version {version!r} is not supported; this rayrec reads {CURSOR_VERSION}")
        if not {"epoch", "parts", "given"} <= data.keys():
            raise ValueError(f"data cursor is malformed: it has {', '.join(data)}")
        try:
            return _FORM.validate_python({name: value for name, value in data.items() if name != "version"})
        except ValidationError as error:
            first_error = error.errors()[0]
            raise ValueError(f"data cursor is malformed: {first_error['loc']}: {first_error['msg']}") from error


_FORM = TypeAdapter(Cursor)


def _merged(parts: Sequence[Progress]) -> Progress:
    """Merges the progress of several ranks in one data set."""
    for name in ("data", "world_size", "total", "before", "step_rows"):
        values = {getattr(progress, name) for progress in parts}
        if len(values) > 1:
            raise ValueError(f"Cursor.merge: the ranks' cursors differ in {name}: {sorted(map(str, values))}")
    rows: dict[int, int] = {}
    for progress in parts:
        for rank, done in progress.rows:
            rows[rank] = max(done, rows.get(rank, 0))
    return replace(parts[0], rows=tuple(sorted(rows.items())))
