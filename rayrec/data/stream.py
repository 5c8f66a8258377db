"""One rank's part of an epoch as a stream of batches, each with the cursor that says what is done after it.

A thread reads and collates ahead. Order and dealing are `order.py`'s, reading is `reading.py`'s.
"""

from __future__ import annotations

import json
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator, Mapping
from types import TracebackType

import pyarrow as pa

from rayrec.data.cursor import Cursor, RankCursor, open_rank
from rayrec.data.errors import DataError
from rayrec.data.manifest import Manifest
from rayrec.data.mapping import check_rows_of
from rayrec.data.options import ReadOptions
from rayrec.data.order import EpochOrder, count
from rayrec.data.readers import choose
from rayrec.data.reading import PROBLEM, Recipe, pieces_of
from rayrec.data.rows import Part, collate, from_columns
from rayrec.data.schema import Schema
from rayrec.models.batch import Batch

Item = tuple[Batch, RankCursor]

_TICK_S = 0.5
_CLOSE_TIMEOUT_S = 10.0
_CLOSE_STALLED_S = 0.2
_STALLED = TimeoutError()


class BatchStream:
    """Iterates over this rank's part of what is left of the cursor's epoch: `(batch, cursor after it)`.

    Over all ranks every row comes exactly once. Batches have exactly `batch_rows` rows, the last one may have fewer.
    Close it (or use it as a context manager) to end its thread and its Ray pipeline before the end.

    Args:
        manifest: the data set, the same on every rank.
        schema: what its columns mean.
        rows_of: feature name to the rows of its table.
        batch_rows: rows of this rank's batches.
        rank, world_size: which part; ranks' rows differ by at most one.
        cursor: where the run is; the same on every rank.
        seed: of the order; the same on every rank and in every epoch.
        shuffle: without it, windows and rows come in the order of the files.
        options: how to read.

    Raises:
        DataError: a feature without a table, or a cursor of other data; in iteration, bad rows and unreadable files.
    """

    def __init__(
        self,
        manifest: Manifest,
        schema: Schema,
        rows_of: Mapping[str, int],
        *,
        batch_rows: int,
        rank: int,
        world_size: int,
        cursor: Cursor,
        seed: int,
        shuffle: bool = True,
        options: ReadOptions | None = None,
    ) -> None:
        if batch_rows < 1 or not 0 <= rank < world_size:
            raise ValueError(f"batch_rows={batch_rows} must be at least 1 and rank={rank} in [0, {world_size})")
        check_rows_of(schema, rows_of)
        options = options or ReadOptions()
        order = EpochOrder.of([w.rows for w in manifest.windows], seed=seed, epoch=cursor.epoch, shuffle=shuffle)
        data = f"{manifest.fingerprint}-{seed}-{int(shuffle)}"
        self.start_cursor = open_rank(cursor, order, data, rank, world_size)
        self.rows = count(self.start_cursor.pieces)
        self.num_batches = math.ceil(self.rows / batch_rows)
        self._options = options
        recipe = Recipe(schema, {name: rows_of[name] for name in schema.sparse_names}, seed, cursor.epoch, shuffle)
        pieces = pieces_of(manifest, order, self.start_cursor.pieces)
        reader = choose(options)

        def batches() -> Generator[Item]:
            tables = reader(pieces, recipe, options)
            return _batches(tables, schema, batch_rows, self.start_cursor)

        self._ahead = _Ahead(batches, options.prefetch_batches)

    def __iter__(self) -> Iterator[Item]:
        """The batches that have not been taken yet."""
        return self

    def __next__(self) -> Item:
        return self._ahead.take(self._options.stall_timeout_s)

    def close(self) -> None:
        """Ends reading; safe to call twice and in the middle."""
        self._ahead.close()

    def __enter__(self) -> BatchStream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _batches(tables: Iterator[pa.Table], schema: Schema, batch_rows: int, start: RankCursor) -> Generator[Item]:
    """Cuts mapped tables into batches of equal size, across tables."""
    waiting: deque[Part] = deque()
    rows = consumed = 0
    total = count(start.pieces)
    try:
        for table in tables:
            for batch in table.to_batches():
                _raise_problem(batch)
                waiting.append((from_columns(batch, len(schema.sparse)), 0, batch.num_rows))
                rows += batch.num_rows
                while rows >= batch_rows:
                    made = collate(_take(waiting, batch_rows), schema)
                    rows, consumed = rows - batch_rows, consumed + batch_rows
                    yield made, RankCursor(start.base, start.pieces, consumed)
        if consumed + rows != total:
            raise DataError(f"{consumed + rows} rows were read where the footers promise {total}")
        if rows:
            yield collate(_take(waiting, rows), schema), RankCursor(start.base, start.pieces, total)
    finally:
        close = getattr(tables, "close", None)
        if close is not None:
            close()


def _take(waiting: deque[Part], rows: int) -> list[Part]:
    """Takes `rows` rows off the front."""
    parts: list[Part] = []
    while rows:
        mapped, start, stop = waiting.popleft()
        cut = min(stop, start + rows)
        parts.append((mapped, start, cut))
        rows -= cut - start
        if cut < stop:
            waiting.appendleft((mapped, cut, stop))
    return parts


def _raise_problem(batch: pa.RecordBatch) -> None:
    column = batch.column(PROBLEM)
    if column.null_count < len(column):
        raise DataError.from_dict(json.loads(column.drop_null()[0].as_py()))


class _Ahead:
    """Runs a generator in a thread, a few items ahead of who takes them."""

    def __init__(self, make: Callable[[], Generator[Item]], depth: int) -> None:
        self._items: queue.Queue[Item | BaseException | None] = queue.Queue(depth)
        self._stop = threading.Event()
        self._over: BaseException | None = None
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, args=(make,), name="rayrec-data", daemon=True
        )
        self._thread.start()

    def take(self, timeout_s: float) -> Item:
        """The next item; raises what the generator raised, StopIteration at its end."""
        if self._over is not None:
            raise self._over
        item = self._wait(timeout_s)
        if isinstance(item, tuple):
            return item
        self.close(_CLOSE_STALLED_S if item is _STALLED else _CLOSE_TIMEOUT_S)
        item = _stalled(timeout_s) if item is _STALLED else item
        self._over = item if item is not None else StopIteration()
        raise self._over

    def _wait(self, timeout_s: float) -> Item | BaseException | None:
        """The next of the queue; `_STALLED` when nothing comes."""
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                return self._items.get(timeout=min(_TICK_S, timeout_s))
            except queue.Empty:
                if time.monotonic() > deadline:
                    return _STALLED

    def close(self, timeout_s: float = _CLOSE_TIMEOUT_S) -> None:
        """Ends the thread; what it had ready is dropped. A thread that waits for a dead source is left to itself."""
        self._stop.set()
        if self._over is None:
            self._over = StopIteration()
        thread, self._thread = self._thread, None
        if thread is None:
            return
        deadline = time.monotonic() + timeout_s
        while thread.is_alive() and time.monotonic() < deadline:
            while not self._items.empty():
                self._items.get_nowait()
            thread.join(0.01)

    def _run(self, make: Callable[[], Generator[Item]]) -> None:
        try:
            items = make()
            try:
                for item in items:
                    if not self._put(item):
                        return
            finally:
                items.close()
            self._put(None)
        except BaseException as error:  # told to the consumer, whatever it is
            self._put(_plain(error))

    def _put(self, item: Item | BaseException | None) -> bool:
        while not self._stop.is_set():
            try:
                self._items.put(item, timeout=_TICK_S)
                return True
            except queue.Full:
                continue
        return False


def _plain(error: BaseException) -> BaseException:
    """The error itself where it is ours, else one line about it: a consumer wants no foreign stack traces."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, DataError):
            return cause
        cause = getattr(cause, "cause", None) or cause.__cause__
    if isinstance(error, MemoryError | KeyboardInterrupt | SystemExit):
        return error
    lines = [line for line in str(error).strip().splitlines() if line.strip()] or [type(error).__name__]
    plain = DataError(f"reading failed: {type(error).__name__}: {lines[-1].strip()}")
    plain.__cause__ = error
    return plain


def _stalled(timeout_s: float) -> DataError:
    return DataError(
        f"no data arrived for {timeout_s:g} s",
        fix="leave CPUs free for read tasks (fewer or smaller workers, a lower cpus_per_read), "
        "set reader: local, or raise stall_timeout_s if the storage is slow",
    )
