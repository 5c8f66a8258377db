"""Logs a sample of requests and their scores as Parquet, as training data.

Each model has a folder. A row of a file is a row of a request: the columns that the model reads, as they were sent, and

- `_request` (request id) and `_row`: the key to join labels by
- `_time`: of the answer, in seconds since 1970
- `_version`
- `_score`, or `_score_LABEL` for each of several labels
"""

from __future__ import annotations

import logging
import os
import socket
import time
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data import Schema
from rayrec.serve.background import BackgroundWorker
from rayrec.serve.config import LogConfig
from rayrec.serve.metrics import ServiceMetrics
from rayrec.serve.routing import Answer, ScoreRequest, unit_hash
from rayrec.serve.v2 import BYTES, IDS, LENGTHS, WEIGHTS, inputs_of

_ARROW_TYPES = {BYTES: pa.string(), "INT64": pa.int64(), "FP64": pa.float64(), "FP32": pa.float32()}
_logger = logging.getLogger(__name__)
_Item = tuple[ScoreRequest, Answer, float]


class FeatureLog:
    """Writes in a background thread. Requests that do not fit its queue are dropped and counted."""

    def __init__(self, config: LogConfig, metrics: ServiceMetrics) -> None:
        self._config, self._metrics = config, metrics
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._schemas: dict[str, Schema] = {}
        self._last_write, self._num_files = time.monotonic(), 0
        self._worker = BackgroundWorker[_Item]("log", self._work)

    def offer(self, requests: Sequence[ScoreRequest], answers: Sequence[Answer]) -> None:
        """Queues the requests that the sampling by request id selects."""
        for request, answer in zip(requests, answers, strict=True):
            selected = unit_hash(f"log {request.id}") < self._config.share
            if selected and not self._worker.offer((request, answer, time.time())):
                self._metrics.logged(request.name, "dropped")

    def close(self) -> None:
        """Writes the queued requests, then ends the thread."""
        self._worker.close()
        self._write()

    def _work(self, item: _Item | None) -> None:
        if item is not None:
            request, answer, answered_at = item
            rows = self._rows.setdefault(request.name, [])
            self._schemas[request.name] = request.loaded.reader.schema
            for number, row in enumerate(_rows_of(request)):
                scores = {
                    _score_column(label, answer): float(values[number]) for label, values in answer.scores.items()
                }
                keys = {"_request": request.id, "_row": number, "_time": answered_at, "_version": answer.version}
                rows.append({**row, **keys, **scores})
            self._metrics.logged(request.name, "logged")
        full = any(len(rows) >= self._config.file_rows for rows in self._rows.values())
        if full or time.monotonic() - self._last_write > self._config.file_s:
            self._write()

    def _write(self) -> None:
        """Writes one file per model that has rows, and removes the oldest files."""
        for model, rows in self._rows.items():
            folder, self._num_files = self._config.folder / model, self._num_files + 1
            replica = f"{socket.gethostname()}-{os.getpid()}"
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{replica}-{self._num_files:06d}.parquet"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                pq.write_table(_table(rows, self._schemas[model]), folder / f".{name}")
                os.replace(folder / f".{name}", folder / name)
                for old in sorted(folder.glob("[0-9]*.parquet"))[: -self._config.files]:
                    old.unlink(missing_ok=True)
            except (OSError, pa.ArrowException) as error:
                _logger.warning("lost %d logged rows of model %s: %s", len(rows), model, error)
                self._metrics.logged(model, "lost file")
        self._rows, self._last_write = {}, time.monotonic()


def _score_column(label: str, answer: Answer) -> str:
    return "_score" if len(answer.scores) == 1 else f"_score_{label}"


def _rows_of(request: ScoreRequest) -> list[dict[str, Any]]:
    """The columns that the model reads; every row includes the context's columns."""
    query, columns = request.query, request.loaded.reader.schema.feature_columns
    rows = query.rows
    if isinstance(rows, pa.Table):
        rows = rows.select([name for name in columns if name in rows.column_names]).to_pylist()
    elif isinstance(rows, dict):
        rows = [{name: rows[name][row] for name in columns if name in rows} for row in range(query.size)]
    return [{name: values.get(name) for name in columns} for values in ({**query.context, **row} for row in rows)]


def _table(rows: Sequence[dict[str, Any]], schema: Schema) -> pa.Table:
    """Column types depend on the schema alone, so that all files have the same types."""
    entries = {entry["name"]: entry for entry in inputs_of(schema)}
    types: dict[str, pa.DataType] = {}
    for name, entry in entries.items():
        value_type = _ARROW_TYPES[entry["datatype"]]
        if name.endswith(IDS) and name.removesuffix(IDS) + WEIGHTS in entries:
            name, value_type = name.removesuffix(IDS), pa.struct([("id", value_type), ("weight", pa.float32())])
        is_list = name + LENGTHS in entries or len(entry["shape"]) > 1
        types[name] = pa.list_(value_type) if is_list else value_type
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows], types.get(name)) for name in names})
