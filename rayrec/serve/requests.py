"""What a request holds, and what is wrong with it: every error is a 4xx that names feature, row and fix.

Either N rows, or one context and N candidates: what the context says is mapped once, and belongs to every candidate.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rayrec.data import DataError, Mapping, Schema
from rayrec.inference.context import I64
from rayrec.models import Batch
from rayrec.serve.arrow import read_stream
from rayrec.serve.context import split, with_contexts
from rayrec.serve.errors import RequestError, parse_json
from rayrec.serve.limits import Limits
from rayrec.sparse import KeyedJaggedTensor
from rayrec.storage.errors import first_line

ARROW = "application/vnd.apache.arrow.stream"
JSON = "application/json"
_MOST_ERRORS = 20
_UNREADABLE = (pa.ArrowException, TypeError, ValueError, OverflowError, KeyError)
_NESTED = frozenset((list, dict))
_MOST_LISTS = 2  # inside one another, in a value; the mapping reports what the schema needs


@dataclass(frozen=True, slots=True)
class Query:
    """What a body holds, before it is mapped.

    Args:
        context: columns that all its candidates share; empty: none.
        rows: a list of rows, a dict of columns, or an Arrow table.
        size: how many rows.
        form: queries of one form can be mapped together; None: only alone.
    """

    context: dict[str, Any]
    rows: Any
    size: int
    form: Hashable


class Reader:
    """Turns bodies into batches, through the mapping of training.

    Args:
        mapping: without labels.
        keys: the model's features, in order.
        shared: those that the model takes once for all rows.
    """

    def __init__(self, mapping: Mapping, keys: Sequence[str], limits: Limits, shared: Sequence[str] = ()) -> None:
        self._mapping, self._keys, self._limits = mapping, tuple(keys), limits
        self._shared = frozenset(shared)
        self._schema = mapping.schema
        self._columns = frozenset(self._schema.feature_columns)
        self._features = (*self._schema.dense, *self._schema.sparse)
        self._part_of = lru_cache(maxsize=64)(self._part)

    @property
    def schema(self) -> Schema:
        """Of the rows of training."""
        return self._schema

    def read(self, body: bytes, content_type: str) -> Query:
        """
        Raises:
            RequestError: the body cannot be parsed, is built in another way, or has no or too many rows.
        """
        return self._arrow(body) if content_type.startswith(ARROW) else self._json(body)

    def batch(self, queries: Sequence[Query]) -> tuple[Batch, KeyedJaggedTensor | None]:
        """The rows of queries of one form, one after the other; of a query alone, what the model takes once for all
        rows comes beside them, a row of its own.

        Raises:
            RequestError: anything at all is wrong with one of them; its text and rows are right for a query alone, of
                several `queries` names those that are probably at fault.
        """
        rows = _together([query.rows for query in queries])
        query_of = np.repeat(np.arange(len(queries)), [query.size for query in queries])
        try:
            if not queries[0].context:
                batch = self._mapped(self._mapping, rows, query_of)
                self._limits.check_ids(batch.sparse.values().numel())
                return batch, None
            return self._with_contexts([query.context for query in queries], rows, query_of)
        except _UNREADABLE as error:
            raise RequestError(422, f"the rows cannot be read: {first_line(error)[:300]}") from error

    def _arrow(self, body: bytes) -> Query:
        table = read_stream(body, self._limits)
        return Query({}, table, table.num_rows, table.schema.remove_metadata().to_string())

    def _json(self, body: bytes) -> Query:
        raw = parse_json(body, parse_constant=_refuse_constant)
        given = [key for key in ("rows", "candidates") if isinstance(raw, dict) and key in raw]
        if not isinstance(raw, dict) or len(given) != 1 or set(raw) - {"rows", "context", "candidates"}:
            usage = 'the body must be {"rows": […]}, or {"context": {…}, "candidates": […]}; the path names a model'
            raise RequestError(400, usage)
        context = raw.get("context", {})
        if not isinstance(context, dict) or (context and given == ["rows"]):
            raise RequestError(400, "context must be an object of columns, beside candidates")
        rows = raw[given[0]]
        size, even = _rows_in(rows)
        self._limits.check_rows(size)
        if _deeper(context.values(), _MOST_LISTS) or _deeper(_each(rows), _MOST_LISTS + 1):
            raise RequestError(400, "the body is nested too deeply: a value is a number, a string, or a list of them")
        there = frozenset(rows if isinstance(rows, dict) else set().union(*rows))
        shared = self._columns.intersection(context)
        twice = sorted(shared & there)
        if twice:
            raise RequestError(422, f"column {twice[0]!r} is in the context and in the candidates; give it once")
        form = (type(rows), there & self._columns, shared) if even else None
        return Query({name: context[name] for name in shared}, rows, size, form)

    def _with_contexts(
        self, contexts: Sequence[dict[str, Any]], rows: Any, query_of: I64
    ) -> tuple[Batch, KeyedJaggedTensor | None]:
        columns = frozenset(contexts[0])
        own = self._mapped(self._part_of(columns, True), contexts, np.arange(len(contexts)))
        rest = self._mapped(self._part_of(columns, False), rows, query_of)
        shared = [key for key in own.sparse.keys() if len(contexts) == 1 and key in self._shared]
        once, each = split(own, shared)
        ids_C = each.sparse.lengths().view(-1, len(contexts)).sum(0).numpy()
        self._limits.check_ids(int(ids_C[query_of].sum()) + rest.sparse.values().numel() + once.values().numel())
        keys = tuple(key for key in self._keys if key not in shared)
        whole = with_contexts(each, rest, query_of, self._schema, columns, keys)
        return whole, once if shared else None

    def _part(self, columns: frozenset[str], inside: bool) -> Mapping:
        """The mapping of the features that are made of these columns, or of the others."""

        def taken(needed: set[str]) -> bool:
            split = needed & columns
            if split and split != needed:
                raise RequestError(422, f"columns {sorted(needed)} belong together: give all in the context, or none")
            return bool(split) == inside

        dense = [feature for feature in self._schema.dense if taken({*self._schema.sources(feature)})]
        sparse = [feature for feature in self._schema.sparse if taken({*self._schema.sources(feature)})]
        schema = self._schema.model_copy(update={"dense": dense, "sparse": sparse})
        return Mapping(schema, self._mapping.rows_of, labels=False)

    def _mapped(self, mapping: Mapping, rows: Any, query_of: I64) -> Batch:
        """
        Args:
            query_of: the query of each row.
        """
        size = len(query_of)
        if not mapping.schema.feature_columns:  # all features are in the other part
            sparse = KeyedJaggedTensor([], torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64))
            return Batch(torch.zeros(size, 0), sparse, torch.zeros(size))
        try:
            batch, errors = mapping.to_batch_and_errors(rows)
        except DataError as error:
            if error.column is not None and error.column not in _columns_of(rows):
                fix = "give it in every row, or in the context; GET /schema lists what a request needs"
                missing = DataError(f"column {error.column!r} is missing", column=error.column, fix=fix)
                raise RequestError(422, f"{missing.problem}; {fix}", [self._detail(None, missing)]) from error
            row = _odd_row(mapping, rows, error.column)
            text = str(error) + ("" if row is None else f" (row {row})")
            suspects = [] if row is None else [int(query_of[row])]
            raise RequestError(422, text, [self._detail(row, error)], suspects) from error
        if errors:
            details = [self._detail(row, error) for row, error in sorted(errors.items())[:_MOST_ERRORS]]
            first = min(errors)
            text = f"{len(errors)} of {size} rows cannot be scored; row {first}: {errors[first]}"
            raise RequestError(422, text, details, query_of[list(errors)].tolist())
        return batch

    def _detail(self, row: int | None, error: DataError) -> dict[str, Any]:
        features = [f.name for f in self._features if error.column in (f.column, *self._schema.sources(f))]
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


def _rows_in(rows: Any) -> tuple[int, bool]:
    """How many rows, and whether all columns have so many.

    Raises:
        RequestError: neither a list of objects nor an object of lists.
    """
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        return len(rows), True
    if isinstance(rows, dict) and all(isinstance(column, list) for column in rows.values()):
        lengths = {len(column) for column in rows.values()}
        return max(lengths, default=0), len(lengths) == 1
    raise RequestError(400, "rows (or candidates) must be a list of objects, or an object of columns, a list each")


def _each(rows: Any) -> Any:
    """The parts of rows or columns: dicts of values, or lists of values."""
    return rows if isinstance(rows, list) else rows.values()


def _deeper(values: Iterable[Any], most: int) -> bool:
    """Whether there are lists or objects inside one another, more than so many."""
    inner = [value for value in values if type(value) in _NESTED]
    if not inner:
        return False
    return not most or any(_deeper(v if isinstance(v, list) else v.values(), most - 1) for v in inner)


def _together(parts: Sequence[Any]) -> Any:
    """The rows of queries of one form."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, dict):
        return {name: [value for part in parts for value in part[name]] for name in first}
    return pa.concat_tables(parts) if isinstance(first, pa.Table) else [row for part in parts for row in part]


def _columns_of(rows: Any) -> set[str]:
    """Those that at least one row has."""
    if isinstance(rows, pa.Table):
        return set(rows.column_names)
    return set(rows) if isinstance(rows, dict) else set().union(*rows)


def _odd_row(mapping: Mapping, rows: Any, column: str | None) -> int | None:
    """A row that cannot be mapped even alone, by halves; None where each can, or the rows are an Arrow table.

    Args:
        column: rows that say nothing of it are not at fault.
    """
    if isinstance(rows, pa.Table):
        return None  # a column has one type
    values = rows.get(column, []) if isinstance(rows, dict) else [row.get(column) for row in rows]
    suspects = [row for row, value in enumerate(values) if value is not None]

    def fails(some: Sequence[int]) -> bool:
        try:
            if isinstance(rows, dict):
                mapping.to_batch_and_errors({name: [of[row] for row in some] for name, of in rows.items()})
            else:
                mapping.to_batch_and_errors([rows[row] for row in some])
        except (DataError, IndexError, *_UNREADABLE):
            return True
        return False

    while len(suspects) > 1:
        half = len(suspects) // 2
        suspects = suspects[:half] if fails(suspects[:half]) else suspects[half:]
    return suspects[0] if suspects and fails(suspects) else None
