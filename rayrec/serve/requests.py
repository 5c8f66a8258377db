"""Parses requests and maps them to batches. Every error is a 4xx that names feature, row and fix.

A request has N rows, or a context and N candidates. The context is mapped once and belongs to every candidate.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
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
_MAX_ERRORS = 20
_UNREADABLE = (pa.ArrowException, TypeError, ValueError, OverflowError, KeyError)
_NESTED = frozenset((list, dict))
_MAX_DEPTH = 2  # of lists in a value; the mapping checks what the schema needs


@dataclass(frozen=True, slots=True)
class Query:
    """A parsed request, not yet mapped.

    Args:
        context: Columns that all candidates share; may be empty.
        rows: A dict of columns, or an Arrow table.
        size: Number of rows.
        form: Queries with equal forms can be mapped as one batch; None: cannot be batched.
    """

    context: dict[str, Any]
    rows: Any
    size: int
    form: Hashable


@dataclass(frozen=True, slots=True)
class Mapped:
    """Queries of one form, mapped.

    Args:
        batch: The rows of all.
        shared: For a single query, the features that the model reads once for all rows, as one row.
        rows: The typed columns that were mapped, of the rows of all; None if there are none.
        contexts: The typed columns of the contexts, one row per query; None without contexts.
    """

    batch: Batch
    shared: KeyedJaggedTensor | None
    rows: pa.Table | None
    contexts: pa.Table | None = None


class Reader:
    """Parses bodies and maps them to batches, like in training.

    Args:
        mapping: Mapping without labels.
        keys: The model's sparse features, in order.
        shared: Features that the model reads once for all rows.
    """

    def __init__(self, mapping: Mapping, keys: Sequence[str], limits: Limits, shared: Sequence[str] = ()) -> None:
        # The pairs of a cross are ids that the model looks up, unless the mapping leaves some out.
        self._mapping = replace(mapping, max_pairs=limits.ids)
        self._keys, self._limits = tuple(keys), limits
        self._shared = frozenset(shared)
        self._schema = mapping.schema
        self._columns = frozenset(self._schema.feature_columns)
        self._features = (*self._schema.dense, *self._schema.sparse)
        self._split_mapping = lru_cache(maxsize=64)(self._split_mapping_uncached)

    @property
    def schema(self) -> Schema:
        """The schema of training rows."""
        return self._schema

    def read(self, body: bytes, content_type: str) -> Query:
        """
        Raises:
            RequestError: The body cannot be parsed, has the wrong structure, or has no rows or too many.
        """
        return self._arrow(body) if content_type.startswith(ARROW) else self._json(body)

    def batch(self, queries: Sequence[Query]) -> tuple[Batch, KeyedJaggedTensor | None]:
        """The batch and the shared features of `map`."""
        mapped = self.map(queries)
        return mapped.batch, mapped.shared

    def check_candidates(self, candidates: pa.Table) -> None:
        """Checks columns that requests will have of their candidates; all others will be in the contexts.

        Raises:
            RequestError: A column has the wrong type, or belongs together with one of the contexts.
        """
        mapping = self._split_mapping(self._columns.difference(candidates.column_names), False)
        self._mapped(mapping, candidates, np.zeros(len(candidates), np.int64))

    def map(self, queries: Sequence[Query]) -> Mapped:
        """Maps queries of one form to a batch with the rows of all.

        Raises:
            RequestError: A query is wrong. For several queries, `RequestError.queries` has the indices of the
                queries probably at fault, and the message is of no use to their clients.
        """
        query_of = np.repeat(np.arange(len(queries)), [query.size for query in queries])
        try:
            rows = _concat([query.rows for query in queries])
            if not queries[0].context:
                batch, table = self._mapped(self._mapping, rows, query_of)
                self._limits.check_ids(batch.sparse.values().numel())
                return Mapped(batch, None, table)
            return self._with_contexts([query.context for query in queries], rows, query_of)
        except _UNREADABLE as error:
            raise RequestError(422, f"the rows cannot be mapped: {first_line(error)[:300]}") from error

    def _arrow(self, body: bytes) -> Query:
        table = read_stream(body, self._limits)
        return Query({}, table, table.num_rows, table.schema.remove_metadata().to_string())

    def _json(self, body: bytes) -> Query:
        raw = parse_json(body, parse_constant=_refuse_constant)
        keys = [key for key in ("rows", "candidates") if isinstance(raw, dict) and key in raw]
        if not isinstance(raw, dict) or len(keys) != 1 or set(raw) - {"rows", "context", "candidates"}:
            usage = 'the body must be {"rows": […]}, or {"context": {…}, "candidates": […]}; the path names a model'
            raise RequestError(400, usage)
        context = raw.get("context", {})
        if not isinstance(context, dict) or (context and keys == ["rows"]):
            raise RequestError(400, "context must be an object of columns, next to candidates")
        rows, size, equal_lengths = self._read_columns(raw[keys[0]])
        self._limits.check_rows(size)
        if _is_deeper(context.values(), _MAX_DEPTH) or _is_deeper(rows.values(), _MAX_DEPTH + 1):
            raise RequestError(400, "the body is nested too deeply: a value is a number, a string, or a list of them")
        context_columns = self._columns.intersection(context)
        duplicates = sorted(context_columns.intersection(rows))
        if duplicates:
            raise RequestError(422, f"column {duplicates[0]!r} is in the context and in the candidates; send it once")
        form = (frozenset(rows), context_columns) if equal_lengths else None
        return Query({name: context[name] for name in context_columns}, rows, size, form)

    def _read_columns(self, rows: Any) -> tuple[dict[str, list[Any]], int, bool]:
        """The columns that the model reads, the number of rows, and whether all columns have it.

        Raises:
            RequestError: Neither a list of objects nor an object of lists.
        """
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            names = self._columns.intersection(name for row in rows for name in row)
            return {name: [row.get(name) for row in rows] for name in names}, len(rows), True
        if isinstance(rows, dict) and all(isinstance(column, list) for column in rows.values()):
            columns = {name: column for name, column in rows.items() if name in self._columns}
            # Without any column of the model, the others tell the size; mapping names a missing column.
            lengths = {len(column) for column in (columns or rows).values()}
            return columns, max(lengths, default=0), len(lengths) == 1
        raise RequestError(400, "rows (or candidates) must be a list of objects, or an object of columns, each a list")

    def _with_contexts(self, contexts: Sequence[dict[str, Any]], rows: Any, query_of: I64) -> Mapped:
        columns = frozenset(contexts[0])
        context_columns = {name: [context[name] for context in contexts] for name in columns}
        context_batch, context_table = self._mapped(
            self._split_mapping(columns, True), context_columns, np.arange(len(contexts))
        )
        row_batch, row_table = self._mapped(self._split_mapping(columns, False), rows, query_of)
        # A batch of several queries has several contexts, so the model cannot read one for all rows.
        shared = [key for key in context_batch.sparse.keys() if len(contexts) == 1 and key in self._shared]
        shared_features, repeated = split(context_batch, shared)
        ids_per_context = repeated.sparse.lengths().view(-1, len(contexts)).sum(0).numpy()
        self._limits.check_ids(
            int(ids_per_context[query_of].sum()) + row_batch.sparse.values().numel() + shared_features.values().numel()
        )
        keys = tuple(key for key in self._keys if key not in shared)
        batch = with_contexts(repeated, row_batch, query_of, self._schema, columns, keys)
        return Mapped(batch, shared_features if shared else None, row_table, context_table)

    def _split_mapping_uncached(self, columns: frozenset[str], in_context: bool) -> Mapping:
        """The mapping of the features that read these columns, or of all other features."""

        def selected(sources: set[str]) -> bool:
            in_columns = sources & columns
            if in_columns and in_columns != sources:
                raise RequestError(422, f"columns {sorted(sources)} belong together: send all in the context, or none")
            return bool(in_columns) == in_context

        of_feature = {feature.name: {*self._schema.sources(feature)} for feature in self._features}
        of_sequence = {
            sequence.name: self._schema.sources_of_values(sequence).union(*(of_feature[name] for name in sequence.ids))
            for sequence in self._schema.sequences
        }
        dense = [feature for feature in self._schema.dense if selected(of_feature[feature.name])]
        sparse = [feature for feature in self._schema.sparse if selected(of_feature[feature.name])]
        sequences = [sequence for sequence in self._schema.sequences if selected(of_sequence[sequence.name])]
        schema = self._schema.model_copy(update={"dense": dense, "sparse": sparse, "sequences": sequences})
        return replace(self._mapping, schema=schema)

    def _mapped(self, mapping: Mapping, rows: Any, query_of: I64) -> tuple[Batch, pa.Table | None]:
        """The batch, and the typed columns that were mapped.

        Args:
            query_of: Index of each row's query.
        """
        size = len(query_of)
        if not mapping.columns:  # all features are in the other mapping
            sparse = KeyedJaggedTensor([], torch.empty(0, dtype=torch.int64), lengths=torch.empty(0, dtype=torch.int64))
            return Batch(torch.zeros(size, 0), sparse, torch.zeros(size)), None
        try:
            table = mapping.to_table(rows)
            batch, errors = mapping.map_table(table)
        except DataError as error:
            if error.column is not None and error.column not in _columns_of(rows):
                fix = "send it in every row, or in the context; GET /schema lists the columns of a request"
                missing = DataError(f"column {error.column!r} is missing", column=error.column, fix=fix)
                raise RequestError(422, f"{missing.problem}; {fix}", [self._detail(None, missing)]) from error
            row = _failing_row(mapping, rows, error.column)
            text = str(error) + ("" if row is None else f" (row {row})")
            queries = [] if row is None else [int(query_of[row])]
            raise RequestError(422, text, [self._detail(row, error)], queries) from error
        if errors:
            details = [self._detail(row, error) for row, error in sorted(errors.items())[:_MAX_ERRORS]]
            first = min(errors)
            text = f"{len(errors)} of {size} rows cannot be scored; row {first}: {errors[first]}"
            raise RequestError(422, text, details, query_of[list(errors)].tolist())
        return batch, table

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
    raise ValueError(f"{name} is not a JSON number")


def _is_deeper(values: Iterable[Any], depth: int) -> bool:
    """Whether lists and objects are nested deeper than `depth`."""
    inner = [value for value in values if type(value) in _NESTED]
    if not inner:
        return False
    return not depth or any(_is_deeper(v if isinstance(v, list) else v.values(), depth - 1) for v in inner)


def _concat(queries: Sequence[Any]) -> Any:
    """The rows of queries of one form."""
    head = queries[0]
    if len(queries) == 1:
        return head
    if isinstance(head, dict):
        return {name: [value for rows in queries for value in rows[name]] for name in head}
    return pa.concat_tables(queries)


def _columns_of(rows: Any) -> set[str]:
    return set(rows.column_names if isinstance(rows, pa.Table) else rows)


def _failing_row(mapping: Mapping, rows: Any, column: str | None) -> int | None:
    """Finds a row that cannot be mapped on its own, by bisection; None if all can.

    Args:
        column: Rows without this column are not at fault.
    """
    if isinstance(rows, pa.Table):
        return None  # all rows of a column have the same type
    suspects = [row for row, value in enumerate(rows.get(column, [])) if value is not None]

    def fails(subset: Sequence[int]) -> bool:
        try:
            mapping.to_batch_and_errors({name: [values[row] for row in subset] for name, values in rows.items()})
        except (DataError, IndexError, *_UNREADABLE):
            return True
        return False

    while len(suspects) > 1:
        half = len(suspects) // 2
        suspects = suspects[:half] if fails(suspects[:half]) else suspects[half:]
    return suspects[0] if suspects and fails(suspects) else None
