"""Where a run is in an epoch: small, exact, and free of any number of ranks.

What was dealt to whom is computed again from it, by `rank_part.py`; who writes cursors to storage is the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter, ValidationError

from rayrec.data.order.intervals import Intervals, count
from rayrec.data.order.periods import Only
from rayrec.storage.errors import DataError

CURSOR_VERSION = 3  # the order of rows is part of what it means


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far one data set has been read in an epoch.

    Args:
        data: fingerprint of the data set and its order.
        world_size: ranks that it was dealt to.
        before: what was done when it was dealt, as intervals of the epoch's sequence.
        rows: of its ranks, how many rows of its part each has done; those that are missing none.
        step_rows: of all ranks, where steps go along the sequence.
        total: rows of the whole sequence.
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
        """Whether all of it has been read."""
        return self.rows_done >= self.total

    def rows_of(self, rank: int) -> int:
        """Rows of its part that a rank has done."""
        return dict(self.rows).get(rank, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """What of one epoch is done: by one rank while it goes on, by all ranks in a checkpoint.

    Args:
        epoch: from 0.
        parts: one a data set; none at the beginning of an epoch, which is the beginning of any data.
        given: of several data sets, rows that all ranks together have been given in this epoch.
        skipped: rows that could not be used and were left out since the stream was opened; not kept in checkpoints.
        only: a column that folders give, and its value: the part of the data set that the epoch reads.
    """

    epoch: int
    parts: tuple[Progress, ...] = ()
    given: int = 0
    skipped: int = 0
    only: Only | None = None

    @classmethod
    def start(cls, epoch: int, only: Only | None = None) -> Cursor:
        """The beginning of an epoch."""
        return cls(epoch=epoch, only=only)

    @property
    def rows_done(self) -> int:
        """Rows of all data sets."""
        return sum(part.rows_done for part in self.parts)

    @property
    def over(self) -> bool:
        """Whether the epoch has been read to its end."""
        return bool(self.parts) and all(part.over for part in self.parts)

    def split(self, parts: int) -> list[Cursor]:
        """The cursor of each of so many data sets.

        Raises:
            DataError: it was made with another number of them.
        """
        if not self.parts:
            return [Cursor.start(self.epoch)] * parts
        if len(self.parts) != parts:
            raise DataError(
                "the checkpoint's place in the data does not fit: it was made with another number of data sets",
                fix="restore what the run was started with, or start a new run under another name",
            )
        return [Cursor(epoch=self.epoch, parts=(part,)) for part in self.parts]

    @staticmethod
    def join(cursors: Sequence[Cursor], given: int) -> Cursor:
        """That of several data sets."""
        return Cursor(
            epoch=cursors[0].epoch,
            parts=tuple(part for cursor in cursors for part in cursor.parts),
            given=given,
            skipped=sum(cursor.skipped for cursor in cursors),
        )

    @staticmethod
    def merge(cursors: Iterable[Cursor]) -> Cursor:
        """The state of all ranks together.

        Raises:
            ValueError: none given, or they are of different epochs, data sets or deals.
        """
        states = list(cursors)
        if not states:
            raise ValueError("Cursor.merge needs the cursor of at least one rank")
        if len({state.epoch for state in states}) > 1:
            raise ValueError(f"Cursor.merge: the ranks' cursors differ in epoch: {[state.epoch for state in states]}")
        started = [state for state in states if state.parts] or states[:1]
        parts = [_merged(same) for same in zip(*(state.parts for state in started), strict=True)]
        given, skipped = max(state.given for state in states), sum(state.skipped for state in states)
        return replace(states[0], parts=tuple(parts), given=given, skipped=skipped)

    def to_dict(self) -> dict[str, Any]:
        """JSON values that `from_dict` reads."""
        parts = [asdict(part) for part in self.parts]
        only = {} if self.only is None else {"only": list(self.only)}
        return {"version": CURSOR_VERSION, "epoch": self.epoch, "parts": parts, "given": self.given, **only}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cursor:
        """The cursor that `to_dict` wrote.

        Raises:
            ValueError: another version, or something that is not a cursor.
        """
        if data.get("version") != CURSOR_VERSION:
            raise ValueError(f"data cursor version {data.get('version')!r}: this rayrec reads {CURSOR_VERSION}")
        if not {"epoch", "parts", "given"} <= data.keys():
            raise ValueError(f"data cursor is malformed: it has {', '.join(data)}")
        try:
            return _FORM.validate_python({name: value for name, value in data.items() if name != "version"})
        except ValidationError as error:
            first = error.errors()[0]
            raise ValueError(f"data cursor is malformed: {first['loc']}: {first['msg']}") from error


_FORM = TypeAdapter(Cursor)


def _merged(parts: Sequence[Progress]) -> Progress:
    """What several ranks have done of one data set."""
    for name in ("data", "world_size", "total", "before", "step_rows"):
        found = {getattr(part, name) for part in parts}
        if len(found) > 1:
            raise ValueError(f"Cursor.merge: the ranks' cursors differ in {name}: {sorted(map(str, found))}")
    rows: dict[int, int] = {}
    for part in parts:
        for rank, done in part.rows:
            rows[rank] = max(done, rows.get(rank, 0))
    return replace(parts[0], rows=tuple(sorted(rows.items())))
