"""`BatchStream`: a rank's share of an epoch as batches, each with the cursor after it.

`order/epoch_planner.py` computes what to read, `reading.py` reads and maps it, `batching.py` cuts batches, and
`prefetch.py` runs all of it in a thread.
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
from rayrec.data.stream.reading import Recipe, window_shares
from rayrec.data.stream.shared_manifest import SharedManifest, planner_of
from rayrec.models.batch import Batch
from rayrec.storage.retries import Patience

Item = tuple[Batch, Cursor]


class BatchStream(Iterator[Item]):
    """Iterates over this rank's share of the rest of the cursor's epoch: yields `(batch, cursor after it)`.

    Over all ranks, every row that passes filters and down-sampling occurs exactly once. Batches have `batch_rows` rows;
    the last one may have fewer. To stop early, close the stream or use it as a context manager; this ends its thread
    and its Ray pipeline.

    Args:
        manifest: the data set, the same on every rank.
        schema: the schema of its columns.
        rows_of: number of table rows for each sparse feature.
        batch_rows: rows of this rank's batches.
        sizes: rows of each batch, an endless iterable; `batch_rows` must be their mean.
        passes: passes over the data, each in another order.
        rank, world_size: this rank, and the number of ranks. The ranks' rows differ by at most one.
        cursor: the position of the run, the same on every rank.
        seed: seed of the order, the same on every rank and in every epoch.
        shuffle: if False, windows and rows are in file order.
        interleave: windows shuffled together.
        in_steps_of: rows of a global batch. Global batches are then contiguous ranges in file order; skipped rows make
            them smaller.
        options: options for reading.
        negative_rate: probability with which a row with label 0 is read, drawn again each epoch. Needs a single label.

    Attributes:
        rows: rows to read.
        skipped: rows skipped under `options.bad_rows`.

    Raises:
        DataError: a feature without a table, or a cursor that does not fit the data; in iteration, bad rows and
            unreadable files.
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
            raise ValueError(f"negative_rate={negative_rate} needs a single label; the schema has {len(schema.tasks)}")
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
        share = planner.open(cursor, ordering, rank, world_size)
        self.start_cursor, self.rows = share.cursor(0), share.rows
        self._batch_rows, self._rows_given, self._rows_read, self._rows_before = batch_rows, 0, 0, share.rows_done
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
            encoded=frozenset(schema.plain_id_columns - {condition.column for condition in manifest.filters}),
        )
        reader, activity = choose(options), Activity()

        def batches() -> Generator[Item]:
            block_ends: deque[int] | None = deque() if recipe.interleaves else None
            tables = activity.watch(reader(window_shares(planner, share, block_ends), recipe, options))
            skipped, fewer = self.skipped, recipe.leaves_out
            if in_steps_of is not None:
                steps = [dealt(size, rank, world_size) for _, size in steps_of(share.rows_of_all, in_steps_of)]
                return make_steps(tables, schema, steps, share, options.bad_rows, skipped)
            batch_sizes = repeat(int(batch_rows)) if sizes is None else sizes
            return make_batches(tables, schema, batch_sizes, share, options.bad_rows, skipped, fewer, block_ends)

        self._prefetcher = Prefetcher(batches, options.prefetch_batches, activity)

    def __next__(self) -> Item:
        batch, cursor = self._prefetcher.take(self._options.longest_wait_s)
        ((_, passed),) = cursor.parts[0].rows
        self._rows_given, self._rows_read = self._rows_given + batch.rows, passed - self._rows_before
        return batch, cursor

    @property
    def share_given(self) -> float:
        """Fraction of the rows read so far that were in batches."""
        return self._rows_given / self._rows_read if self._rows_read and not self._in_steps else 1.0

    @property
    def batches_left(self) -> int:
        """Number of remaining batches; an estimate if rows are skipped."""
        return math.ceil(round((self.rows - self._rows_read) * self.share_given, 6) / self._batch_rows)

    @property
    def over(self) -> bool:
        """True if all rows have been read."""
        return self._rows_read == self.rows

    def close(self) -> None:
        """Ends reading. May be called at any time, and repeatedly."""
        self._prefetcher.close()

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
