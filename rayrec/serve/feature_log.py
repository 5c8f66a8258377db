"""Logs a sample of requests and their scores as Parquet, as training data.

Each model has a folder. A row of a file is a row of a request: the columns that the model reads, and

- `_request` (request id) and `_row`: the key to join labels by
- `_time`: of the answer, in seconds since 1970
- `_version`
- `_score`, or `_score_LABEL` for each of several labels

The folder `_retrieve` has the items that a ranker scored for `/retrieve`, in the order in which they were found, with

- `_query`: the number of the query in its request
- `_item`: the id of the item; `_request`, `_query` and `_item` are the key
- `_version`: of the index

A file has rows of one version, whose schema alone decides the types of the columns.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pat

from rayrec.data import Schema
from rayrec.data.arrays.arrow_types import as_named, leaf_of, type_of
from rayrec.data.mapping.map_rows import one_array
from rayrec.data.mapping.null_types import expected_types
from rayrec.serve.background import BackgroundWorker
from rayrec.serve.config import LogConfig
from rayrec.serve.metrics import ServiceMetrics
from rayrec.serve.requests import Mapped
from rayrec.serve.retrieval import Ranked
from rayrec.serve.routing import Answer, ScoreRequest, unit_hash

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Item:
    """An answered request.

    Args:
        mapped: The batch in which it was scored.
        start: Its first row there.
        place: Of its context there.
        more: Further columns.
    """

    request: ScoreRequest
    answer: Answer
    answered_at: float
    mapped: Mapped
    start: int
    place: int
    more: Mapping[str, pa.Array]


class FeatureLog:
    """Writes in a background thread. Requests that do not fit its queue are dropped and counted.

    The rows are those that were mapped, already in Arrow's memory: the thread copies and writes them without holding
    the interpreter for long.
    """

    def __init__(self, config: LogConfig, metrics: ServiceMetrics) -> None:
        self._config, self._metrics = config, metrics
        self._tables: dict[tuple[str, str], list[pa.Table]] = {}  # by model and version
        self._last_write, self._num_files = time.monotonic(), 0
        self._worker = BackgroundWorker[_Item]("log", self._work)

    def offer_ranked(self, name: str, id: str, ranked: Ranked) -> None:
        """As `offer`, for a request whose queries a ranker has scored.

        Args:
            name: Of the index, in metrics.
            id: Of the request.
        """
        requests, answers, more, stop = list[ScoreRequest](), list[Answer](), list[dict[str, pa.Array]](), 0
        for place, query in zip(ranked.places, ranked.queries, strict=True):
            start, stop = stop, stop + query.size
            requests.append(ScoreRequest(name, ranked.loaded, query, 0.0, id))
            scores = {label: values[start:stop] for label, values in ranked.scores.items()}
            answers.append(Answer(name, ranked.version, scores))
            places = pa.array(np.full(query.size, place))
            more.append({"_query": places, "_item": one_array(ranked.ids.slice(start, query.size))})
        self.offer(requests, answers, ranked.mapped, more)

    def offer(
        self,
        requests: Sequence[ScoreRequest],
        answers: Sequence[Answer | Exception],
        mapped: Mapped,
        more: Sequence[Mapping[str, pa.Array]] = (),
    ) -> None:
        """Queues the requests that the sampling by request id selects.

        Args:
            answers: Requests with an error are not logged.
            mapped: The batch of the requests.
            more: Further columns of each request; default: none.
        """
        start = 0
        for place, (request, answer) in enumerate(zip(requests, answers, strict=True)):
            if isinstance(answer, Answer) and unit_hash(f"log {request.id}") < self._config.share:
                further = more[place] if more else {}
                item = _Item(request, answer, time.time(), mapped, start, place, further)
                if not self._worker.offer(item):
                    self._metrics.logged(request.name, "dropped")
            start += request.query.size

    def close(self) -> None:
        """Writes the queued requests, then ends the thread."""
        self._worker.close()
        self._write()

    def _work(self, item: _Item | None) -> None:
        if item is not None:
            model = item.request.name
            try:
                table = _table_of(item)
            except Exception as error:  # this request only
                _logger.warning("a request of model %s is not logged: %s", model, error)
                self._metrics.logged(model, "dropped")
            else:
                self._tables.setdefault((model, item.answer.version), []).append(table)
                self._metrics.logged(model, "logged")
        full = any(sum(map(len, tables)) >= self._config.file_rows for tables in self._tables.values())
        if full or time.monotonic() - self._last_write > self._config.file_s:
            self._write()

    def _write(self) -> None:
        """Writes one file per version that has rows, and removes the oldest files."""
        tables_by_version, self._tables, self._last_write = self._tables, {}, time.monotonic()
        for (model, _), tables in tables_by_version.items():
            folder, self._num_files = self._config.folder / model.replace("/", "_"), self._num_files + 1
            replica = f"{socket.gethostname()}-{os.getpid()}"
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{replica}-{self._num_files:06d}.parquet"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                pq.write_table(pa.concat_tables(tables), folder / f".{name}")
                os.replace(folder / f".{name}", folder / name)
                for old in sorted(folder.glob("[0-9]*.parquet"))[: -self._config.files]:
                    old.unlink(missing_ok=True)
            except Exception as error:  # later files may succeed
                _logger.warning("lost %d logged rows of model %s: %s", sum(map(len, tables)), model, error)
                self._metrics.logged(model, "lost file")


def _table_of(item: _Item) -> pa.Table:
    """The columns that the model reads; every row includes the context's columns. A copy, so that the rest of the batch
    is freed.
    """
    schema, size, mapped = item.request.loaded.reader.schema, item.request.query.size, item.mapped
    rows, contexts = (list[int](range(item.start, item.start + size)), [item.place] * size)
    parts = [
        part.take(pa.array(places, pa.int64()))
        for part, places in ((mapped.contexts, contexts), (mapped.rows, rows))
        if part is not None
    ]
    given = {name: part.column(name) for part in parts for name in part.column_names}
    kinds = expected_types(schema)
    columns = {name: _typed(name, given[name], schema, kinds.get(name)) for name in schema.feature_columns}
    answer, keys = item.answer, {"_request": item.request.id, "_version": item.answer.version}
    columns |= {name: pa.array([value] * size, pa.string()) for name, value in keys.items()}
    columns |= {"_row": pa.array(np.arange(size)), "_time": pa.array(np.full(size, item.answered_at))}
    columns |= item.more
    for label, values in answer.scores.items():
        columns[_score_column(label, answer)] = pa.array(values.astype(np.float64))
    return pa.table(columns)


def _score_column(label: str, answer: Answer) -> str:
    return "_score" if len(answer.scores) == 1 else f"_score_{label}"


def _typed(name: str, column: pa.ChunkedArray, schema: Schema, expected: pa.DataType | None) -> pa.Array:
    """A column in the type that depends on the schema alone, so that all files of a version have the same types.

    Inputs of derived columns have the type of the training data. Times of sequences are integers in their unit. An
    integer of 64 bits without a sign has the bits of the signed one, as in the mapping.
    """
    array = one_array(column)
    plain = schema.column_types.get(name)
    if plain is not None and (kind := type_of(plain)) is not None:
        return as_named(_cast(array, kind), plain)
    units = {value.column_name: value.unit for value in schema.stored_values if value.kind == "time"}
    if name in units:
        if not pat.is_integer(leaf_of(array.type)):
            array = _cast(array, pa.list_(pa.timestamp(units[name])))
        return _cast(array, pa.list_(pa.int64()))
    return array if expected is None else _cast(array, expected)


def _cast(array: pa.Array, kind: pa.DataType) -> pa.Array:
    if array.type == kind:
        return array
    options = pc.CastOptions(kind, allow_int_overflow=True, allow_time_truncate=True, allow_float_truncate=True)
    return pc.cast(array, options=options)
