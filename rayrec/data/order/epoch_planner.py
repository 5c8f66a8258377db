"""One rank's part of an epoch, computed on demand: how many rows, and piece by piece which of which files.

`EpochPlanner` holds the manifest and answers; it runs in the reading process, or, where a manifest is too large to be
given to every worker, in an actor (`stream/shared_manifest.py`).
"""

from __future__ import annotations

import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from rayrec.data.arrays.buffers import I64
from rayrec.data.order.cursor import Cursor, Progress
from rayrec.data.order.deal import deal, deal_steps
from rayrec.data.order.epoch import EpochOrder
from rayrec.data.order.intervals import Intervals, Spans, count, cut, spans, union
from rayrec.data.order.periods import Only
from rayrec.data.source.file_table import FileNames, ranges
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.windows import Slices
from rayrec.storage.errors import DataError

T = TypeVar("T")

PIECES_AT_ONCE = 2048
_SLICES_AT_ONCE = 16_384
_KEPT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """How every epoch of a data set is ordered.

    Args:
        seed: of the order.
        shuffle: without it, windows and rows come in the order of the files.
        interleave: windows whose rows come mixed.
        passes: how often all rows come, each time in another order.
        step_rows: of all ranks: steps go along the sequence then.
        only: a column that folders give, and its value: the part of the data set that is meant.
    """

    seed: int
    shuffle: bool = True
    interleave: int = 1
    passes: int = 1
    step_rows: int | None = None
    only: Only | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPart:
    """Which part of which epoch: this rank's, dealt to so many ranks after `before` was done.

    Args:
        first: rows of it that were done when the stream was opened.
        rows: rows of it that are left.
        left: rows of all ranks that are left.
        total: rows of the whole sequence.
    """

    ordering: Ordering
    epoch: int
    data: str
    before: Intervals
    rank: int
    world_size: int
    first: int = 0
    rows: int = 0
    left: int = 0
    total: int = 0

    def cursor(self, passed: int, skipped: int = 0) -> Cursor:
        """The rank's state after so many of its rows that were left."""
        progress = Progress(
            data=self.data,
            world_size=self.world_size,
            total=self.total,
            before=self.before,
            rows=((self.rank, self.first + passed),),
            step_rows=self.ordering.step_rows,
        )
        return Cursor(epoch=self.epoch, parts=(progress,), skipped=skipped, only=self.ordering.only)


@dataclass(frozen=True, slots=True)
class PieceColumns:
    """Some pieces of a rank's part, one after another, in columns: P pieces of S slices and I intervals in all.

    Args:
        group: of each piece's block, from 1; 0 for a block that is a group of its own, [P].
        window_ends: how many windows the pieces up to each have, [P]; those of whole blocks.
        windows: their numbers, [W].
        slice_ends: how many slices the windows up to each have, [W].
        slices: all slices; they count `files`.
        interval_ends: how many intervals the pieces up to each have, [P].
        intervals: what of each block's own sequence the piece is, [I, 2].
    """

    group: I64
    window_ends: I64
    windows: I64
    slice_ends: I64
    slices: Slices
    files: FileNames
    interval_ends: I64
    intervals: Spans

    @property
    def rows(self) -> int:
        return count(self.intervals)

    def __reduce__(self) -> tuple[Any, ...]:
        """Sent compressed: most numbers need few of their bytes."""
        return _received, (zlib.compress(pickle.dumps([getattr(self, one.name) for one in fields(self)], 5), 1),)


def _received(sent: bytes) -> PieceColumns:
    return PieceColumns(*pickle.loads(zlib.decompress(sent)))


class EpochPlanner:
    """Answers what a rank reads, and keeps the last few orders and deals. For one thread at a time."""

    def __init__(self, manifest: Manifest | Path) -> None:
        """Of a manifest, or of the file in which one was pickled."""
        self.manifest: Manifest = pickle.loads(manifest.read_bytes()) if isinstance(manifest, Path) else manifest
        self._kept: OrderedDict[Hashable, Any] = OrderedDict()

    def open(self, cursor: Cursor, ordering: Ordering, rank: int, world_size: int) -> RankPart:
        """This rank's part of what is left of the cursor's epoch.

        As many ranks as before go on exactly where each was; another number of ranks is dealt the rest anew.

        Raises:
            DataError: the cursor was made with other data, another seed, or another window size.
        """
        data = (
            f"{self._manifest(ordering).fingerprint}-{ordering.seed}-{ordering.interleave if ordering.shuffle else 0}"
        )
        (cursor,) = cursor.split(1)
        done = cursor.parts[0] if cursor.parts else None
        new = RankPart(ordering=ordering, epoch=cursor.epoch, data=data, before=(), rank=rank, world_size=world_size)
        if done is not None and done.over:  # of data that may have grown since
            return replace(new, data=done.data, before=((0, done.total),), total=done.total)
        if done is not None and done.data != data:
            raise DataError(
                "the checkpoint's place in the data does not fit: files, row counts, seed, shuffle or window size "
                "changed",
                fix="restore what the run was started with (files may be added between epochs), or start a new run "
                "under another name",
            )
        if done is None:
            part = new
        elif (done.world_size, done.step_rows) == (world_size, ordering.step_rows):
            part = replace(new, before=done.before, first=done.rows_of(rank))
        else:
            key = ("done", done, new.epoch, new.ordering)  # the same for every rank that asks
            part = replace(new, before=self._remember(key, lambda: self._done(done, new)))
        total = self._order(part).rows
        left = total - (0 if done is None else done.rows_done)
        return replace(part, rows=count(self._spans(part)) - part.first, left=left, total=total)

    def pieces(self, part: RankPart, passed: int) -> PieceColumns:
        """The next pieces of a part after so many of its rows that were left, up to `PIECES_AT_ONCE`."""
        order = self._order(part)
        every = self._spans(part)
        ends = self._remember(("ends", part.rank, *_deal_key(part)), lambda: np.cumsum(every[:, 1] - every[:, 0]))
        done = part.first + passed
        at = int(np.searchsorted(ends, done, side="right"))
        some = every[at : at + PIECES_AT_ONCE]
        fragments, blocks = _by_block(order, cut(some, done - (int(ends[at - 1]) if at else 0))[1])
        begins = np.flatnonzero(np.diff(blocks, prepend=-1))
        slices = np.cumsum(_slice_counts(order, self._manifest(part.ordering), blocks[begins]))
        cut_off = at + len(some) < len(ends)  # what follows may go on in the last block
        most = max(1, min(len(begins) - cut_off, int(np.searchsorted(slices, _SLICES_AT_ONCE, side="right"))))
        interval_ends = np.append(begins[1:], len(blocks))[:most]
        manifest = self._manifest(part.ordering)
        return _columns(manifest, order, blocks[begins[:most]], fragments[: interval_ends[-1]], interval_ends)

    def _done(self, done: Progress, new: RankPart) -> Intervals:
        """What was done of an earlier deal, as intervals."""
        ordering = replace(new.ordering, step_rows=done.step_rows)
        found = [spans(done.before)]
        for rank, rows in done.rows:
            part = replace(new, ordering=ordering, before=done.before, rank=rank, world_size=done.world_size)
            found.append(cut(self._spans(part), rows)[0])
        return union(np.concatenate(found))

    def _manifest(self, ordering: Ordering) -> Manifest:
        only = ordering.only
        return self.manifest if only is None else self._remember(("only", only), lambda: self.manifest.only(only))

    def _order(self, part: RankPart) -> EpochOrder:
        ordering, windows = part.ordering, self._manifest(part.ordering).windows
        return self._remember(
            ("order", part.epoch, replace(ordering, step_rows=None)),
            lambda: EpochOrder.of(
                windows.rows,
                seed=ordering.seed,
                epoch=part.epoch,
                shuffle=ordering.shuffle,
                passes=ordering.passes,
                interleave=ordering.interleave,
                runs=windows.runs,
            ),
        )

    def _spans(self, part: RankPart) -> Spans:
        """A rank's whole part of a deal."""
        order, steps = self._order(part), part.ordering.step_rows
        if steps is not None:
            key = ("steps", part.rank, *_deal_key(part))
            return self._remember(key, lambda: deal_steps(order, part.before, part.rank, part.world_size, steps))
        return self._remember(("deal", *_deal_key(part)), lambda: deal(order, part.before, part.world_size))[part.rank]

    def _remember(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        self._kept.move_to_end(key)
        found: T = self._kept[key]
        return found


def _columns(manifest: Manifest, order: EpochOrder, blocks: I64, fragments: Spans, interval_ends: I64) -> PieceColumns:
    windows = manifest.windows
    in_order = order.windows[ranges(order.blocks[blocks], order.blocks[blocks + 1])]
    numbers = in_order % len(windows)
    counts = np.diff(windows.edges)[numbers]
    slices = windows.slices(ranges(windows.edges[numbers], windows.edges[numbers + 1]))
    files, places = np.unique(slices.file, return_inverse=True)
    group = np.searchsorted(order.groups, blocks, side="right") - 1
    alone = order.groups[group + 1] - order.groups[group] == 1
    starts = np.repeat(order.starts[blocks], np.diff(interval_ends, prepend=0))
    return PieceColumns(
        np.where(alone, 0, group + 1),
        np.cumsum(order.blocks[blocks + 1] - order.blocks[blocks]),
        in_order,
        np.cumsum(counts),
        replace(slices, file=places.reshape(-1)),
        manifest.files.names(files),
        interval_ends,
        fragments - starts[:, None],
    )


def _deal_key(part: RankPart) -> tuple[Hashable, ...]:
    return (part.epoch, part.ordering, part.before, part.world_size)


def _by_block(order: EpochOrder, some: Spans) -> tuple[Spans, I64]:
    """Intervals cut where blocks begin, and the block of each."""
    first = np.searchsorted(order.starts, some[:, 0], side="right") - 1
    last = np.searchsorted(order.starts, some[:, 1] - 1, side="right") - 1
    blocks = ranges(first, last + 1)
    whole = np.repeat(some, last - first + 1, axis=0)
    starts, stops = np.maximum(whole[:, 0], order.starts[blocks]), np.minimum(whole[:, 1], order.starts[blocks + 1])
    return np.stack([starts, stops], axis=1), blocks


def _slice_counts(order: EpochOrder, manifest: Manifest, blocks: I64) -> I64:
    """How many slices the windows of each block have."""
    edges, windows = manifest.windows.edges, manifest.windows
    lengths = order.blocks[blocks + 1] - order.blocks[blocks]
    numbers = order.windows[ranges(order.blocks[blocks], order.blocks[blocks + 1])] % len(windows)
    each = edges[numbers + 1] - edges[numbers]
    ends = np.cumsum(lengths)
    before = np.concatenate([np.zeros(1, np.int64), np.cumsum(each)])
    return before[ends] - before[ends - lengths]
