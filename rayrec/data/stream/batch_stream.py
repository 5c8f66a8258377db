"""One rank's part of an epoch as a stream of batches, each with the cursor that says what is done after it.

What is read when is `order/rank_part.py`'s, reading is `reading.py`'s, cutting into batches `batching.py`'s, the thread
that does it ahead of time `prefetch.py`'s.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Mapping
from itertools import repeat

from rayrec.data.config import ReadOptions
from rayrec.data.mapping.map_rows import check_rows_of
from rayrec.data.mapping.schema import Schema
from rayrec.data.order.cursor import Cursor
from rayrec.data.order.epoch import dealt, steps_of
from rayrec.data.order.epoch_planner import Ordering
from rayrec.data.source.manifest import Manifest
from rayrec.data.stream.batching import Skipped, make_batches, make_steps
from rayrec.data.stream.prefetch import Activity, Prefetcher
from rayrec.data.stream.readers import choose
from rayrec.data.stream.reading import Recipe, pieces_of
from rayrec.data.stream.shared_manifest import SharedManifest, planner_of
from rayrec.models.batch import Batch
from rayrec.storage.retries import Patience

Item = tuple[Batch, Cursor]


class BatchStream(Iterator[Item]):
    """Iterates over this rank's part of what is left of the cursor's epoch: `(batch, cursor after it)`.

    Over all ranks every row that filters and down-sampling leave comes exactly once. Batches have exactly `batch_rows`
    rows, the last one may have fewer.
    Close it (or use it as a context manager) to end its thread and its Ray pipeline before the end.

    Args:
        manifest: the data set, the same on every rank.
        schema: what its columns mean.
        rows_of: feature name to the rows of its table.
        batch_rows: rows of this rank's batches.
        sizes: rows of one batch after another, without an end; `batch_rows` is their mean then.
        passes: how often all rows come, each time in another order.
        rank, world_size: which part; ranks' rows differ by at most one.
        cursor: where the run is; the same on every rank.
        seed: of the order; the same on every rank and in every epoch.
        shuffle: without it, windows and rows come in the order of the files.
        interleave: windows whose rows are shuffled together.
        in_steps_of: rows of a batch of all ranks: batches go along the order of the files then, so that no row of one
            comes before a row of an earlier one on any rank, and lack the rows that are left out.
        options: how to read.
        negative_rate: the part of the rows with label 0 that is read, drawn anew each epoch; the schema has one label.

    `rows` says how many rows are to be read, `batches_left` how many batches are to come (an estimate, from what passed
    so far, where rows are left out), `skipped` what was left out under `options.bad_rows`.

    Raises:
        DataError: a feature without a table, or a cursor of other data; in iteration, bad rows and unreadable files.
    """

    def __init__(
        self,
        manifest: Manifest | SharedManifest,
        schema: Schema,
        rows_of: Mapping[str, int],
        *,
        batch_rows: int | float,
        rank: int,
        world_size: int,
        cursor: Cursor,
        seed: int,
        shuffle: bool = True,
        options: ReadOptions | None = None,
        negative_rate: float = 1.0,
        sizes: Iterable[int] | None = None,
        passes: int = 1,
        interleave: int = 1,
        in_steps_of: int | None = None,
    ) -> None:
        if batch_rows <= 0 or not 0 <= rank < world_size:
            raise ValueError(f"batch_rows={batch_rows} must be positive and rank={rank} in [0, {world_size})")
        if negative_rate < 1 and len(schema.tasks) > 1:
            raise ValueError(f"negative_rate={negative_rate} works with one label; the schema has {len(schema.tasks)}")
        check_rows_of(schema, rows_of)
        options = options or ReadOptions()
        planner = planner_of(manifest)
        ordering = Ordering(
            seed=seed,
            shuffle=shuffle,
            interleave=interleave,
            passes=passes,
            step_rows=in_steps_of,
            only=cursor.only,
        )
        part = planner.open(cursor, ordering, rank, world_size)
        self.start_cursor, self.rows = part.cursor(0), part.rows
        self._batch_rows, self._given, self._read, self._first = batch_rows, 0, 0, part.first
        self._options, self._in_steps = options, in_steps_of is not None
        self.skipped = Skipped()
        recipe = Recipe(
            manifest.columns,
            schema,
            {name: rows_of[name] for name in schema.sparse_names},
            seed,
            cursor.epoch,
            shuffle,
            Patience(options.retries, options.patience_s),
            options.bad_rows,
            manifest.filters,
            negative_rate,
            interleave=interleave if shuffle else 1,
            deletes=manifest.leaves_out,
        )
        reader, activity = choose(options), Activity()

        def batches() -> Generator[Item]:
            block_ends: deque[int] | None = deque() if recipe.interleaves else None
            tables = activity.watch(reader(pieces_of(planner, part, block_ends), recipe, options))
            skipped, fewer = self.skipped, recipe.leaves_out
            if in_steps_of is not None:
                steps = [dealt(size, rank, world_size) for _, size in steps_of(part.left, in_steps_of)]
                return make_steps(tables, schema, steps, part, options.bad_rows, skipped)
            wanted = repeat(int(batch_rows)) if sizes is None else sizes
            return make_batches(tables, schema, wanted, part, options.bad_rows, skipped, fewer, block_ends)

        self._prefetcher = Prefetcher(batches, options.prefetch_batches, activity)

    def __next__(self) -> Item:
        batch, cursor = self._prefetcher.take(self._options.longest_wait_s)
        ((_, passed),) = cursor.parts[0].rows
        self._given, self._read = self._given + batch.rows, passed - self._first
        return batch, cursor

    @property
    def share_given(self) -> float:
        """Of the rows read so far, those that came in batches."""
        return self._given / self._read if self._read and not self._in_steps else 1.0

    @property
    def batches_left(self) -> int:
        """How many batches are to come, as far as that is known."""
        return math.ceil(round((self.rows - self._read) * self.share_given, 6) / self._batch_rows)

    @property
    def over(self) -> bool:
        """Whether all rows have come."""
        return self._read == self.rows

    def close(self) -> None:
        """Ends reading; safe to call twice and in the middle."""
        self._prefetcher.close()

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
