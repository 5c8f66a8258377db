"""Where a run is in an epoch: small, exact, and free of any number of ranks.

What the positions mean is `order/epoch.py`'s matter; who writes cursors to storage is the checkpoint's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from rayrec.data.errors import DataError
from rayrec.data.order.epoch import EpochOrder, Interval, Intervals, count, deal, deal_steps, subtract, union

CURSOR_VERSION = 1


class _HasRows(Protocol):
    @property
    def rows(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """What of one epoch is done, as intervals of its row sequence.

    Args:
        epoch: from 0.
        done: intervals that have been consumed.
        data: fingerprint of data set and order that `done` refers to; None before the first batch.
        world_size: ranks that the epoch was last dealt to, so that as many ranks go on exactly as they were.
        dealt_after: what was done when it was last dealt.
    """

    epoch: int
    done: Intervals = ()
    data: str | None = None
    world_size: int | None = None
    dealt_after: Intervals = ()

    @classmethod
    def start(cls, epoch: int) -> Cursor:
        """The beginning of an epoch."""
        return cls(epoch=epoch)

    @property
    def rows_done(self) -> int:
        return count(self.done)

    def finished(self, manifest: _HasRows) -> bool:
        """Whether every row of the epoch is done."""
        return self.rows_done >= manifest.rows

    @staticmethod
    def merge(cursors: Iterable[Cursor | RankCursor]) -> Cursor:
        """The state of all ranks together.

        Raises:
            ValueError: none given, or they are of different epochs, data sets or deals.
        """
        states = [c.cursor() if isinstance(c, RankCursor) else c for c in cursors]
        if not states:
            raise ValueError("Cursor.merge needs the cursor of at least one rank")
        started = [state for state in states if state.data is not None] or states[:1]
        for name in ("epoch", "data", "world_size", "dealt_after"):
            found = {getattr(state, name) for state in (states if name == "epoch" else started)}
            if len(found) > 1:
                raise ValueError(f"Cursor.merge: the ranks' cursors differ in {name}: {sorted(map(str, found))}")
        head = started[0]
        return Cursor(
            epoch=head.epoch,
            done=union(i for state in states for i in state.done),
            data=head.data,
            world_size=head.world_size,
            dealt_after=head.dealt_after,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON values that `from_dict` reads."""
        return {
            "version": CURSOR_VERSION,
            "epoch": self.epoch,
            "done": [list(i) for i in self.done],
            "data": self.data,
            "world_size": self.world_size,
            "dealt_after": [list(i) for i in self.dealt_after],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Cursor:
        """The cursor that `to_dict` wrote.

        Raises:
            ValueError: another version, or something that is not a cursor.
        """
        if data.get("version") != CURSOR_VERSION:
            raise ValueError(f"data cursor version {data.get('version')!r}: this rayrec reads {CURSOR_VERSION}")
        try:
            return cls(
                epoch=int(data["epoch"]),
                done=union((int(a), int(b)) for a, b in data["done"]),
                data=data["data"],
                world_size=data["world_size"],
                dealt_after=union((int(a), int(b)) for a, b in data["dealt_after"]),
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"data cursor is malformed: {error!r}") from error


@dataclass(frozen=True, slots=True)
class RankCursor:
    """One rank's state after a batch; cheap to make, turned into a `Cursor` only when asked.

    Args:
        base: what all ranks had done when this rank's stream was opened.
        pieces: this rank's part of the rest, in order.
        rows: rows of those pieces consumed so far.
        skipped: those of them that could not be used and were left out.
    """

    base: Cursor
    pieces: tuple[Interval, ...]
    rows: int
    skipped: int = 0

    @property
    def epoch(self) -> int:
        return self.base.epoch

    def cursor(self) -> Cursor:
        """`base` with this rank's rows done."""
        done, left = list(self.base.done), self.rows
        for start, stop in self.pieces:
            if left <= 0:
                break
            done.append((start, min(stop, start + left)))
            left -= stop - start
        base = self.base
        return Cursor(
            epoch=base.epoch,
            done=union(done),
            data=base.data,
            world_size=base.world_size,
            dealt_after=base.dealt_after,
        )

    def to_dict(self) -> dict[str, Any]:
        """The same JSON values as the `Cursor`'s."""
        return self.cursor().to_dict()


def open_rank(
    cursor: Cursor, order: EpochOrder, data: str, rank: int, world_size: int, in_steps_of: int | None = None
) -> RankCursor:
    """This rank's part of what is left of the cursor's epoch.

    As many ranks as before go on exactly where each was; another number of ranks is dealt the rest anew.

    Args:
        in_steps_of: rows of a step of all ranks, where steps go along the sequence: all ranks are as far then.

    Raises:
        DataError: the cursor was made with other data, another seed, or another window size.
    """
    if cursor.data not in (None, data):
        raise DataError(
            "the checkpoint's place in the data does not fit: files, row counts, seed, shuffle or window size changed",
            fix="restore what the run was started with, or start a new run under another name",
        )
    if in_steps_of is not None:
        base = Cursor(epoch=cursor.epoch, done=cursor.done, data=data, world_size=world_size, dealt_after=cursor.done)
        return RankCursor(base, tuple(deal_steps(order, cursor.done, rank, world_size, in_steps_of)), 0)
    same = cursor.world_size == world_size and cursor.data is not None
    dealt_after = cursor.dealt_after if same else cursor.done
    base = Cursor(epoch=cursor.epoch, done=cursor.done, data=data, world_size=world_size, dealt_after=dealt_after)
    mine = subtract(deal(order, dealt_after, world_size)[rank], cursor.done)
    return RankCursor(base, tuple(mine), 0)
