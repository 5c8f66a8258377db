"""`EpochPlanner`: computes a rank's share of an epoch on demand: its rows, and the slices of files to read.

It runs in the reading process, or for a large manifest in an actor (`stream/shared_manifest.py`).
"""

from __future__ import annotations

import pickle
import zlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, TypeVar

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

RANGES_AT_ONCE = 2048
_SLICES_AT_ONCE = 16_384
_CACHE_SIZE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ordering:
    """How the epochs of a data set are ordered.

    Args:
        seed: seed of the order.
        shuffle: if False, windows and rows are in file order.
        interleave: number of windows to interleave.
        passes: passes over the data, each in another order.
        step_rows: rows of a global batch, if global batches are contiguous ranges of the sequence.
        only: the period: a partition column and its value.
    """

    seed: int
    shuffle: bool = True
    interleave: int = 1
    passes: int = 1
    step_rows: int | None = None
    only: Only | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RankShare:
    """A rank's share of an epoch.

    Args:
        ordering: order of the epoch.
        epoch: number of the epoch.
        data: fingerprint of the data set and its order.
        before: sample ranges that were done when the epoch was divided among `world_size` ranks.
        rank: the rank.
        world_size: number of ranks.
        rows_done: rows of the share that were done when the stream was opened.
        rows: rows of the share that remain.
        rows_of_all: rows of all ranks that remain.
        total: rows of the epoch's sequence.
    """

    ordering: Ordering
    epoch: int
    data: str
    before: Intervals
    rank: int
    world_size: int
    rows_done: int = 0
    rows: int = 0
    rows_of_all: int = 0
    total: int = 0

    def cursor(self, passed: int, skipped: int = 0) -> Cursor:
        """The rank's cursor after `passed` of the remaining rows."""
        progress = Progress(
            data=self.data,
            world_size=self.world_size,
            total=self.total,
            before=self.before,
            rows=((self.rank, self.rows_done + passed),),
            step_rows=self.ordering.step_rows,
        )
        return Cursor(epoch=self.epoch, parts=(progress,), skipped=skipped, only=self.ordering.only)


@dataclass(frozen=True, slots=True)
class ShareColumns:
    """Consecutive blocks of a rank's share, in columns: P blocks with W windows, S slices and I sample ranges.

    Args:
        group: the group of each block, from 1; 0 if the block is the only one of its group, [P].
        window_ends: cumulative number of windows, [P].
        windows: numbers of the windows, [W].
        slice_ends: cumulative number of slices, [W].
        slices: the slices; `slices.file` are indices into `files`.
        files: the files.
        interval_ends: cumulative number of sample ranges, [P].
        intervals: the rank's sample ranges, relative to the start of the block, [I, 2].
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
        """Pickles compressed: most numbers are small."""
        return _unpickle, (zlib.compress(pickle.dumps([getattr(self, column.name) for column in fields(self)], 5), 1),)


def _unpickle(compressed: bytes) -> ShareColumns:
    return ShareColumns(*pickle.loads(zlib.decompress(compressed)))


class Planner(Protocol):
    """Computes what a rank reads: an `EpochPlanner` of this process, or the handle of one in an actor."""

    def open(self, cursor: Cursor, ordering: Ordering, rank: int, world_size: int) -> RankShare:
        """As `EpochPlanner.open`."""

    def next_blocks(self, share: RankShare, passed: int) -> ShareColumns:
        """As `EpochPlanner.next_blocks`."""


class EpochPlanner:
    """Computes what a rank reads, and caches the last few results. Not thread-safe."""

    def __init__(self, manifest: Manifest | Path) -> None:
        """Takes a manifest, or the path of a pickled one."""
        self.manifest: Manifest = pickle.loads(manifest.read_bytes()) if isinstance(manifest, Path) else manifest
        self._cache: OrderedDict[Hashable, Any] = OrderedDict()

    def open(self, cursor: Cursor, ordering: Ordering, rank: int, world_size: int) -> RankShare:
        """This rank's share of what remains of the cursor's epoch.

        With the same number of ranks, each continues where it stopped. With another number, the rest is divided again.

        Raises:
            DataError: the data, the seed or the window size do not fit the cursor.
        """
        data = (
            f"{self._manifest(ordering).fingerprint}-{ordering.seed}-{ordering.interleave if ordering.shuffle else 0}"
        )
        (cursor,) = cursor.split(1)
        done = cursor.parts[0] if cursor.parts else None
        new = RankShare(ordering=ordering, epoch=cursor.epoch, data=data, before=(), rank=rank, world_size=world_size)
        if done is not None and done.over:  # the data may have grown since
            return replace(new, data=done.data, before=((0, done.total),), total=done.total)  # no rows: not read
        if done is not None and done.data != data:
            raise DataError(
                "the checkpoint's cursor does not fit the data: files, row counts, seed, shuffle or window size "
                "changed",
                fix="restore the original data and config (files may be added between epochs), or start a new run "
                "under another name",
            )
        if done is None:
            share = new
        elif (done.world_size, done.step_rows) == (world_size, ordering.step_rows):
            share = replace(new, before=done.before, rows_done=done.rows_of(rank))
        else:
            key = ("done", done, new.epoch, new.ordering)  # equal for all ranks
            share = replace(new, before=self._remember(key, lambda: self._done(done, new)))
        total = self._manifest(ordering).rows * ordering.passes
        rows_of_all = total - (0 if done is None else done.rows_done)
        return replace(share, rows=count(self._spans(share)) - share.rows_done, rows_of_all=rows_of_all, total=total)

    def next_blocks(self, share: RankShare, passed: int) -> ShareColumns:
        """The next blocks of a share after `passed` of the remaining rows; at most `RANGES_AT_ONCE` sample ranges."""
        order = self._order(share)
        ranges = self._spans(share)
        ends = self._remember(("ends", share.rank, *_deal_key(share)), lambda: np.cumsum(ranges[:, 1] - ranges[:, 0]))
        rows_done = share.rows_done + passed
        first = int(np.searchsorted(ends, rows_done, side="right"))
        next_ranges = ranges[first : first + RANGES_AT_ONCE]
        fragments, blocks = _by_block(order, cut(next_ranges, rows_done - (int(ends[first - 1]) if first else 0))[1])
        block_starts = np.flatnonzero(np.diff(blocks, prepend=-1))
        slices = np.cumsum(_slice_counts(order, self._manifest(share.ordering), blocks[block_starts]))
        truncated = first + len(next_ranges) < len(ends)  # the last block may continue in the next range
        num_blocks = max(
            1, min(len(block_starts) - truncated, int(np.searchsorted(slices, _SLICES_AT_ONCE, side="right")))
        )
        interval_ends = np.append(block_starts[1:], len(blocks))[:num_blocks]
        manifest = self._manifest(share.ordering)
        return _columns(
            manifest, order, blocks[block_starts[:num_blocks]], fragments[: interval_ends[-1]], interval_ends
        )

    def _done(self, done: Progress, new: RankShare) -> Intervals:
        """The sample ranges done under an earlier division among ranks."""
        ordering = replace(new.ordering, step_rows=done.step_rows)
        ranges = [spans(done.before)]
        for rank, rows in done.rows:
            share = replace(new, ordering=ordering, before=done.before, rank=rank, world_size=done.world_size)
            ranges.append(cut(self._spans(share), rows)[0])
        return union(np.concatenate(ranges))

    def _manifest(self, ordering: Ordering) -> Manifest:
        only = ordering.only
        return self.manifest if only is None else self._remember(("only", only), lambda: self.manifest.only(only))

    def _order(self, share: RankShare) -> EpochOrder:
        ordering, windows = share.ordering, self._manifest(share.ordering).windows
        return self._remember(
            ("order", share.epoch, replace(ordering, step_rows=None)),
            lambda: EpochOrder.of(
                windows.rows,
                seed=ordering.seed,
                epoch=share.epoch,
                shuffle=ordering.shuffle,
                passes=ordering.passes,
                interleave=ordering.interleave,
                runs=windows.runs,
            ),
        )

    def _spans(self, share: RankShare) -> Spans:
        """All sample ranges of a rank's share."""
        order, steps, span = self._order(share), share.ordering.step_rows, self._manifest(share.ordering).span
        if steps is not None:
            key = ("steps", share.rank, *_deal_key(share))
            return self._remember(
                key, lambda: deal_steps(order, share.before, share.rank, share.world_size, steps, span)
            )
        shares = self._remember(("deal", *_deal_key(share)), lambda: deal(order, share.before, share.world_size, span))
        return shares[share.rank]

    def _remember(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._cache:
            self._cache[key] = make()
            while len(self._cache) > _CACHE_SIZE:
                self._cache.popitem(last=False)
        self._cache.move_to_end(key)
        value: T = self._cache[key]
        return value


def _columns(manifest: Manifest, order: EpochOrder, blocks: I64, fragments: Spans, interval_ends: I64) -> ShareColumns:
    windows = manifest.windows
    in_order = order.windows[ranges(order.blocks[blocks], order.blocks[blocks + 1])]
    numbers = in_order % len(windows)
    counts = np.diff(windows.edges)[numbers]
    slices = windows.slices(ranges(windows.edges[numbers], windows.edges[numbers + 1]))
    files, file_index = np.unique(slices.file, return_inverse=True)
    group = np.searchsorted(order.groups, blocks, side="right") - 1
    only_block = order.groups[group + 1] - order.groups[group] == 1
    starts = np.repeat(order.starts[blocks], np.diff(interval_ends, prepend=0))
    return ShareColumns(
        np.where(only_block, 0, group + 1),
        np.cumsum(order.blocks[blocks + 1] - order.blocks[blocks]),
        in_order,
        np.cumsum(counts),
        replace(slices, file=file_index.reshape(-1)),
        manifest.files.names(files),
        interval_ends,
        fragments - starts[:, None],
    )


def _deal_key(share: RankShare) -> tuple[Hashable, ...]:
    return (share.epoch, share.ordering, share.before, share.world_size)


def _by_block(order: EpochOrder, sample_ranges: Spans) -> tuple[Spans, I64]:
    """Cuts sample ranges at the starts of blocks; also returns the block of each."""
    first_block = np.searchsorted(order.starts, sample_ranges[:, 0], side="right") - 1
    last_block = np.searchsorted(order.starts, sample_ranges[:, 1] - 1, side="right") - 1
    blocks = ranges(first_block, last_block + 1)
    uncut = np.repeat(sample_ranges, last_block - first_block + 1, axis=0)
    starts, stops = np.maximum(uncut[:, 0], order.starts[blocks]), np.minimum(uncut[:, 1], order.starts[blocks + 1])
    return np.stack([starts, stops], axis=1), blocks


def _slice_counts(order: EpochOrder, manifest: Manifest, blocks: I64) -> I64:
    """Number of slices in the windows of each block."""
    edges, windows = manifest.windows.edges, manifest.windows
    lengths = order.blocks[blocks + 1] - order.blocks[blocks]
    numbers = order.windows[ranges(order.blocks[blocks], order.blocks[blocks + 1])] % len(windows)
    counts = edges[numbers + 1] - edges[numbers]
    ends = np.cumsum(lengths)
    cumulative = np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)])
    return cumulative[ends] - cumulative[ends - lengths]
