"""Requests and their scores as Parquet, to train on: sampled, bounded, in files that take turns.

Below the folder lies one for each model. A row is a row of a request: the columns that the model reads, as they came,
and beside them `_request` (the request's id) and `_row`, by which labels are joined, `_time` (of the answer, seconds
since 1970), `_version`, and `_score`, or `_score_LABEL` of each of several labels.
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
from rayrec.serve.behind import Behind
from rayrec.serve.config import LogConfig
from rayrec.serve.measures import Measures
from rayrec.serve.traffic import Answer, ScoreRequest, place_of
from rayrec.serve.v2 import BYTES, IDS, LENGTHS, WEIGHTS, inputs_of

_KINDS = {BYTES: pa.string(), "INT64": pa.int64(), "FP64": pa.float64(), "FP32": pa.float32()}
_logger = logging.getLogger(__name__)
_Item = tuple[ScoreRequest, Answer, float]


class FeatureLog:
    """Writes behind the answers; what its queue has no room for is dropped, and counted."""

    def __init__(self, config: LogConfig, measures: Measures) -> None:
        self._config, self._measures = config, measures
        self._rows: dict[str, list[dict[str, Any]]] = {}
        self._schemas: dict[str, Schema] = {}
        self._since, self._files = time.monotonic(), 0
        self._behind = Behind[_Item]("log", self._work)

    def offer(self, requests: Sequence[ScoreRequest], answers: Sequence[Answer]) -> None:
        """Draws some by their ids."""
        for request, answer in zip(requests, answers, strict=True):
            drawn = place_of(f"log {request.id}") < self._config.share
            if drawn and not self._behind.offer((request, answer, time.time())):
                self._measures.logged(request.name, "dropped")

    def close(self) -> None:
        """Writes what waits, and ends."""
        self._behind.close()
        self._write()

    def _work(self, item: _Item | None) -> None:
        if item is not None:
            request, answer, now = item
            rows = self._rows.setdefault(request.name, [])
            self._schemas[request.name] = request.loaded.reader.schema
            for number, row in enumerate(_rows_of(request)):
                scores = {_column(label, answer): float(values[number]) for label, values in answer.scores.items()}
                head = {"_request": request.id, "_row": number, "_time": now, "_version": answer.version}
                rows.append({**row, **head, **scores})
            self._measures.logged(request.name, "logged")
        full = any(len(rows) >= self._config.file_rows for rows in self._rows.values())
        if full or time.monotonic() - self._since > self._config.file_s:
            self._write()

    def _write(self) -> None:
        """A file for each model that has rows; the oldest go."""
        for model, rows in self._rows.items():
            folder, self._files = self._config.folder / model, self._files + 1
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{os.getpid()}-{self._files:06d}.parquet"
            try:
                folder.mkdir(parents=True, exist_ok=True)
                pq.write_table(_table(rows, self._schemas[model]), folder / f".{name}")
                os.replace(folder / f".{name}", folder / name)
                for old in sorted(folder.glob("[0-9]*.parquet"))[: -self._config.files]:
                    old.unlink(missing_ok=True)
            except (OSError, pa.ArrowException) as error:
                _logger.warning("%d rows of %s are not logged: %s", len(rows), model, error)
                self._measures.logged(model, "lost file")
        self._rows, self._since = {}, time.monotonic()


def _column(label: str, answer: Answer) -> str:
    return "_score" if len(answer.scores) == 1 else f"_score_{label}"


def _rows_of(request: ScoreRequest) -> list[dict[str, Any]]:
    """With the columns that the model reads, the context's in every row."""
    query, wanted = request.query, request.loaded.reader.schema.feature_columns
    rows = query.rows
    if isinstance(rows, pa.Table):
        rows = rows.select([name for name in wanted if name in rows.column_names]).to_pylist()
    elif isinstance(rows, dict):
        rows = [{name: rows[name][place] for name in wanted if name in rows} for place in range(query.size)]
    return [{name: of.get(name) for name in wanted} for of in ({**query.context, **row} for row in rows)]


def _table(rows: Sequence[dict[str, Any]], schema: Schema) -> pa.Table:
    """In the same types in every file, whatever the requests said."""
    entries = {entry["name"]: entry for entry in inputs_of(schema)}
    types: dict[str, pa.DataType] = {}
    for name, entry in entries.items():
        kind = _KINDS[entry["datatype"]]
        if name.endswith(IDS) and name.removesuffix(IDS) + WEIGHTS in entries:
            name, kind = name.removesuffix(IDS), pa.struct([("id", kind), ("weight", pa.float32())])
        listed = name + LENGTHS in entries or len(entry["shape"]) > 1
        types[name] = pa.list_(kind) if listed else kind
    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: pa.array([row.get(name) for row in rows], types.get(name)) for name in names})
