"""What a request holds, and what is wrong with it: every error is a 4xx that names feature, row and fix.

Either N rows, or one context and N candidates: what the context says is mapped once, and belongs to every candidate.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping as Dict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import torch

from rayrec.data import DataError, Mapping, Schema
from rayrec.models import Batch
from rayrec.sparse import KeyedJaggedTensor

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
_MOST_ERRORS = 20


class BadRequest(Exception):
    """A request that is refused.

    Args:
        status: 4xx.
        text: what is wrong, and the fix.
        errors: the rows at fault: feature, row, column, value, problem, fix.
    """

    def __init__(self, status: int, text: str, errors: Sequence[Dict[str, Any]] = ()) -> None:
        super().__init__(text)
        self.status, self.text, self.errors = status, text, list(errors)

    def to_dict(self) -> dict[str, Any]:
        return {"error": self.text, **({"errors": self.errors} if self.errors else {})}


@dataclass(frozen=True, slots=True)
class Limits:
    """Of one request.

    Args:
        body_bytes: of its body.
        rows: rows, or candidates.
        ids: of all its lists together, once every candidate has the context's.
    """

    body_bytes: int = 8 << 20
    rows: int = 10_000
    ids: int = 2_000_000


class Reader:
    """Turns bodies into batches, through the mapping of training.

    Args:
        mapping: without labels.
        keys: the model's features, in order.
    """

    def __init__(self, mapping: Mapping, keys: Sequence[str], limits: Limits) -> None:
        self._mapping, self._keys, self._limits = mapping, tuple(keys), limits
        self._schema = mapping.schema
        self._part_of = lru_cache(maxsize=64)(self._part)

    @property
    def schema(self) -> Schema:
        """Of the rows of training."""
        return self._schema

    def batch(self, body: bytes, content_type: str) -> Batch:
        """
        Raises:
            BadRequest: anything at all is wrong with it.
        """
        try:
            batch = self._arrow(body) if content_type.startswith(ARROW) else self._json(body)
            self._check_ids(batch.sparse.values().numel())
            return batch
        except (pa.ArrowException, TypeError, ValueError, OverflowError, KeyError) as error:
            raise BadRequest(422, f"the rows cannot be read: {str(error).splitlines()[0][:300]}") from error

    def _arrow(self, body: bytes) -> Batch:
        try:
            with pa.ipc.open_stream(body) as stream:
                table = stream.read_all()
            table.validate(full=True)
        except (pa.ArrowException, OSError, ValueError) as error:
            raise BadRequest(400, f"the body is no Arrow IPC stream: {str(error).splitlines()[0][:300]}") from error
        return self._mapped(self._mapping, table, table.num_rows)

    def _json(self, body: bytes) -> Batch:
        try:
            raw = json.loads(body, parse_constant=_refuse_constant)
        except RecursionError:
            raise BadRequest(400, "the body is nested too deeply") from None
        except ValueError as error:
            raise BadRequest(400, f"the body is no JSON: {str(error)[:300]}") from None
        given = [key for key in ("rows", "candidates") if isinstance(raw, dict) and key in raw]
        if not isinstance(raw, dict) or len(given) != 1 or set(raw) - {"rows", "context", "candidates", "model"}:
            raise BadRequest(400, 'the body must be {"rows": […]}, or {"context": {…}, "candidates": […]}')
        context = raw.get("context", {})
        if not isinstance(context, dict) or (context and given == ["rows"]):
            raise BadRequest(400, "context must be an object of columns, beside candidates")
        rows = raw[given[0]]
        size = _rows_in(rows)
        self._check_rows(size)
        if not context:
            return self._mapped(self._mapping, rows, size)
        return self._with_context(context, rows, size)

    def _with_context(self, context: dict[str, Any], candidates: Any, size: int) -> Batch:
        columns = frozenset(name for name in context if name in self._schema.feature_columns)
        there = candidates if isinstance(candidates, dict) else {name for row in candidates for name in row}
        twice = sorted(columns.intersection(there))
        if twice:
            raise BadRequest(422, f"column {twice[0]!r} is in the context and in the candidates; give it once")
        own = self._mapped(self._part_of(columns, True), [context], 1)
        rest = self._mapped(self._part_of(columns, False), candidates, size)
        self._check_ids(own.sparse.values().numel() * size + rest.sparse.values().numel())
        return _joined(own, rest, self._schema, columns, self._keys, size)

    def _part(self, columns: frozenset[str], inside: bool) -> Mapping:
        """The mapping of the features that are made of these columns, or of the others."""

        def taken(needed: set[str]) -> bool:
            split = needed & columns
            if split and split != needed:
                raise BadRequest(422, f"columns {sorted(needed)} belong together: give all of them in the context")
            return bool(split) == inside

        dense = [feature for feature in self._schema.dense if taken({feature.column})]
        sparse = [
            feature
            for feature in self._schema.sparse
            if taken({feature.column, *([feature.weight_column] if feature.weight_column else [])})
        ]
        schema = self._schema.model_copy(update={"dense": dense, "sparse": sparse})
        return Mapping(schema, self._mapping.rows_of, labels=False)

    def _mapped(self, mapping: Mapping, rows: Any, size: int) -> Batch:
        self._check_rows(size)
        if not mapping.schema.feature_columns:  # all features are in the other part
            sparse = KeyedJaggedTensor([], torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64))
            return Batch(torch.zeros(size, 0), sparse, torch.zeros(size))
        try:
            batch, errors = mapping.to_batch_and_errors(rows)
        except DataError as error:
            row = _odd_row(rows, error.column)
            text = str(error) + ("" if row is None else f" (row {row})")
            raise BadRequest(422, text, [self._told(row, error)]) from error
        if errors:
            told = [self._told(row, error) for row, error in sorted(errors.items())[:_MOST_ERRORS]]
            first = min(errors)
            raise BadRequest(422, f"{len(errors)} of {size} rows cannot be scored; row {first}: {errors[first]}", told)
        return batch

    def _check_rows(self, size: int) -> None:
        if size == 0:
            raise BadRequest(422, "there are no rows; give at least one")
        if size > self._limits.rows:
            raise BadRequest(
                413, f"{size:,} rows are more than the {self._limits.rows:,} of a request; send several requests"
            )

    def _check_ids(self, count: int) -> None:
        if count > self._limits.ids:
            raise BadRequest(
                413,
                f"{count:,} ids are more than the {self._limits.ids:,} of a request; send shorter lists, fewer rows",
            )

    def _told(self, row: int | None, error: DataError) -> dict[str, Any]:
        features = [f.name for f in (*self._schema.dense, *self._schema.sparse) if f.column == error.column]
        return {
            "feature": features[0] if features else None,
            "row": row,
            "column": error.column,
            "value": error.value,
            "problem": error.problem,
            "fix": error.fix,
        }


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


def _rows_in(rows: Any) -> int:
    """
    Raises:
        BadRequest: neither a list of objects nor an object of lists.
    """
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        return len(rows)
    if isinstance(rows, dict) and all(isinstance(column, list) for column in rows.values()):
        return max(map(len, rows.values()), default=0)
    raise BadRequest(400, "rows (or candidates) must be a list of objects, or an object of columns, a list each")


def _odd_row(rows: Any, column: str | None) -> int | None:
    """The first row whose value in a column is of another kind than most; None where all are of one kind."""
    if isinstance(rows, dict):
        values = rows.get(column, [])
    elif isinstance(rows, list):
        values = [row.get(column) for row in rows]
    else:
        return None  # an Arrow column has one type
    kinds = [_kind(value) for value in values]
    if len(set(kinds)) < 2:
        return 0 if len(kinds) == 1 else None
    usual = Counter(kind for kind in kinds if kind is not None).most_common(1)[0][0]
    return next(row for row, kind in enumerate(kinds) if kind not in (usual, None))


def _kind(value: Any) -> Any:
    """JSON's kind of a value; that of a list is its values'."""
    if isinstance(value, list):
        return ("list", *sorted({str(_kind(item)) for item in value if item is not None}))
    if isinstance(value, bool) or value is None:
        return None if value is None else "bool"
    if isinstance(value, int):
        return "integer" if -(2**63) <= value < 2**64 else "too large"
    return type(value).__name__


def _joined(
    context: Batch, rest: Batch, schema: Schema, columns: frozenset[str], keys: Sequence[str], size: int
) -> Batch:
    """The candidates' rows, each with the context's features."""
    dense: list[torch.Tensor] = [torch.zeros(size, 0)]
    own_at = rest_at = 0
    for feature in schema.dense:
        if feature.column in columns:
            dense.append(context.dense[:, own_at : own_at + feature.width].expand(size, -1))
            own_at += feature.width
        else:
            dense.append(rest.dense[:, rest_at : rest_at + feature.width])
            rest_at += feature.width
    inside = context.sparse.index_per_key()
    values, lengths, weights = [], [], []
    for key in keys:
        jagged, times = (context.sparse[key], size) if key in inside else (rest.sparse[key], 1)
        values.append(jagged.values().repeat(times))
        lengths.append(jagged.lengths().repeat(times))
        if schema.weighted:
            given = jagged.weights_or_none()
            weights.append((torch.ones(len(jagged.values())) if given is None else given).repeat(times))
    sparse = KeyedJaggedTensor(
        list(keys),
        torch.cat(values) if values else torch.empty(0, dtype=torch.int64),
        torch.cat(weights) if weights else None,
        lengths=torch.cat(lengths) if lengths else torch.empty(0, dtype=torch.int64),
        stride=size,
    )
    return Batch(torch.cat(dense, dim=1), sparse, torch.zeros(size))
