"""Where a run is in an epoch of several data sets: a cursor of each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rayrec.data.errors import DataError
from rayrec.data.order.cursor import Cursor, RankCursor


@dataclass(frozen=True, slots=True)
class MixCursor:
    """The cursors of the data sets of a mix, of one rank or of all.

    Args:
        parts: one a data set.
        given: rows of the mix that all ranks together have been given in this epoch.
    """

    parts: tuple[Cursor | RankCursor, ...]
    given: int = 0

    @classmethod
    def of(cls, cursor: Cursor | MixCursor, parts: int) -> MixCursor:
        """That of a mix of so many data sets; a cursor at the beginning of an epoch is the beginning of each.

        Raises:
            DataError: it was made with other data.
        """
        if isinstance(cursor, Cursor) and cursor == Cursor.start(cursor.epoch):
            return cls((cursor,) * parts)
        if isinstance(cursor, Cursor) or len(cursor.parts) != parts:
            raise other_data()
        return cursor

    @property
    def epoch(self) -> int:
        return self.parts[0].epoch

    @property
    def done(self) -> bool:
        """Whether any row has been given."""
        return self.given > 0

    @property
    def skipped(self) -> int:
        return sum(part.skipped for part in self.parts if isinstance(part, RankCursor))

    def to_dict(self) -> dict[str, Any]:
        """JSON values that `cursor_from_dict` reads."""
        return {"mix": [part.to_dict() for part in self.parts], "given": self.given}


def merge(cursors: Sequence[Cursor | RankCursor | MixCursor]) -> Cursor | MixCursor:
    """The state of all ranks together; raises as `Cursor.merge`."""
    mixes = [cursor for cursor in cursors if isinstance(cursor, MixCursor)]
    if not mixes:
        return Cursor.merge(cursor for cursor in cursors if not isinstance(cursor, MixCursor))
    assert len(mixes) == len(cursors), "all ranks read the same data sets"
    parts = zip(*(mix.parts for mix in mixes), strict=True)
    return MixCursor(tuple(Cursor.merge(part) for part in parts), max(mix.given for mix in mixes))


def cursor_from_dict(data: Mapping[str, Any]) -> Cursor | MixCursor:
    """The cursor that a `to_dict` wrote; raises as `Cursor.from_dict`."""
    if "mix" not in data:
        return Cursor.from_dict(data)
    return MixCursor(tuple(Cursor.from_dict(part) for part in data["mix"]), int(data["given"]))


def other_data() -> DataError:
    return DataError(
        "the checkpoint's place in the data does not fit: it was made with another number of data sets",
        fix="restore what the run was started with, or start a new run under another name",
    )
