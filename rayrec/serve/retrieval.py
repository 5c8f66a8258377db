"""`POST /retrieve`: the best items for histories or vectors, from an index. Independent of HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import torch
from pydantic import Field, ValidationError, model_validator

from rayrec._runtime.strict import Strict
from rayrec.inference.artifact import read_index
from rayrec.inference.index import ItemIndex
from rayrec.serve.errors import RequestError
from rayrec.serve.limits import Limits
from rayrec.serve.versions import Versions, check_parity
from rayrec.storage.cache import CACHE_BYTES, Held

MAX_K = 1000
# Numbers and ids of an answer: each is a Python object for a while, and about 20 bytes of JSON.
MAX_ANSWER = 1_000_000
_UNREADABLE = (pa.ArrowException, TypeError, ValueError, OverflowError, KeyError)
Ids = list[int | str]
Number = Annotated[float, Field(gt=-1e30, lt=1e30, allow_inf_nan=False)]


class Query(Strict):
    """A query: a history, a vector, or a row; and its time, in seconds since 1970 or as ISO 8601 text (default UTC)."""

    history: Ids | None = None
    vector: list[Number] | None = None
    row: dict[str, Any] | None = None
    exclude: Ids = Field([])
    time: Annotated[int, Field(ge=0, lt=1 << 40)] | datetime | None = None

    @model_validator(mode="after")
    def _check(self) -> Query:
        if (self.history, self.vector, self.row).count(None) != 2:
            raise ValueError("a query must have one of: history, vector, row (with the columns that training read)")
        return self

    @property
    def seconds(self) -> int | None:
        """The time in seconds since 1970."""
        if not isinstance(self.time, datetime):
            return self.time
        return int((self.time if self.time.tzinfo is not None else self.time.replace(tzinfo=UTC)).timestamp())

    @property
    def kind(self) -> str:
        return "row" if self.row is not None else "history" if self.vector is None else "vector"


class Request(Strict):
    """A request; `Retrieval` describes its fields."""

    queries: list[Query]
    k: Annotated[int, Field(ge=1, le=MAX_K)] = 10
    filter: dict[str, list[str | int | bool | Number]] | None = None
    keep_seen: bool = False
    vectors: bool = False


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """A loaded version of an index with its query tower.

    Args:
        export: Keeps the version's files in the cache.
    """

    index: ItemIndex
    export: Held

    @property
    def version(self) -> str:
        return self.index.version

    @property
    def folder(self) -> Path:
        return self.index.folder


def load_index(export: Held) -> LoadedIndex:
    """Loads a version; its checksums must have been checked.

    Raises:
        ExportError: The export has no index, or its queries are outside their limits.
    """
    check_index(export.folder)
    return LoadedIndex(ItemIndex(export.folder, checksums=False), export)


class Retrieval:
    """Answers requests from the newest version of an index.

    A request is JSON: `{"queries": [{"history": [ids], "exclude": [ids]}], "k": 10, "filter": {"column": [values]},
    "keep_seen": false, "vectors": false}`. Instead of `history`, a query may have a `vector`, or a `row`: an object
    with the columns that the query tower reads; with `time`, a model that reads times answers as of then, else as of
    the newest item. Results exclude the items of the history unless `keep_seen`. With
    `vectors`, each result includes the vector of its query.

    A result has `ids` and `scores`, best first, and `known`, the number of ids of the history that the model knows. If
    nothing of a query is known, so that all items have the same score, `ids` is empty.

    Args:
        path: An export with an index, or a folder of exports; a path or URI.
        on_change: See `Versions`.
        cache_bytes: Disk space on this node for copies of exports from object storage.

    Raises:
        ExportError: The index is missing or incomplete.
    """

    def __init__(
        self,
        path: Path | str,
        limits: Limits | None = None,
        on_change: Callable[[str, str, str], object] = lambda *_: None,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        self.limits = limits or Limits()
        self.versions = Versions(path, load_index, on_change, cache_bytes)

    @property
    def index(self) -> ItemIndex:
        """The active version."""
        return self.versions.active.index

    def health(self, details: bool = True) -> dict[str, Any]:
        """The active version; with details also its folder, warnings, and refused versions with the reason."""
        index = self.index
        entry: dict[str, Any] = {"version": index.version}
        if details:
            warnings = [] if index.model is None else index.model.warnings
            entry |= {"folder": str(index.folder), "warnings": warnings, "refused": dict(self.versions.refused)}
        return entry

    def answer(self, body: bytes) -> bytes:
        """
        Raises:
            RequestError: The request is wrong.
        """
        request, index = _parse(body), self.index  # read once: a request keeps one version until its end
        self.limits.check_rows(len(request.queries))
        seen_column = index.seen_column
        _check_answer(request, index.report.dim)
        histories = [_history(query, seen_column) for query in request.queries]
        seen = [[] if request.keep_seen else history for history in histories]
        exclude = [[*history, *query.exclude] for history, query in zip(seen, request.queries, strict=True)]
        lists = [value for query in request.queries for value in (query.row or {}).values() if isinstance(value, list)]
        self.limits.check_ids(sum(map(len, exclude)) + sum(map(len, histories)) + sum(map(len, lists)))
        try:
            queries, known = _vectors(index, request.queries, histories)
            scores, rows = index.search(queries, request.k, exclude, request.filter)
        except _UNREADABLE as error:
            raise RequestError(422, str(error)[:300]) from None
        results: list[dict[str, Any]] = [
            {"ids": ids, "scores": [float(f"{score:.9g}") for score in query_scores[: len(ids)]]}
            for ids, query_scores in zip(index.ids_of(rows), scores.tolist(), strict=True)
        ]
        if known is not None:
            results = [{**result, "known": count} for result, count in zip(results, known, strict=True)]
        if request.vectors:
            results = [{**result, "vector": vector} for result, vector in zip(results, queries.tolist(), strict=True)]
        return json.dumps({"version": index.version, "results": results}, default=str).encode()


def _vectors(
    index: ItemIndex, queries: Sequence[Query], histories: Sequence[Ids]
) -> tuple[torch.Tensor, list[int] | None]:
    """
    Returns:
        vectors `[Q, D]`; the number of known ids of each history, None if the queries have no history.

    Raises:
        ValueError: The queries are of different kinds, or a vector does not have the index's dimension.
    """
    vectors, dim = [query.vector for query in queries if query.vector is not None], index.report.dim
    rows, times = [query.row for query in queries if query.row is not None], [query.seconds for query in queries]
    if len({query.kind for query in queries}) > 1:
        raise ValueError("queries must be all histories, all vectors, or all rows")
    if rows:
        return index.queries_of(rows, times), None if index.seen_column is None else index.known(histories)
    if any(time is not None for time in times):
        raise ValueError("`time` needs `row`, with the times of its history")
    if not vectors:
        return index.queries_and_known(histories)
    for number, vector in enumerate(vectors):
        if len(vector) != dim:
            raise ValueError(f"query {number}: vector must be {dim} finite numbers")
    return torch.tensor(vectors), None


def _check_answer(request: Request, dim: int) -> None:
    """
    Raises:
        RequestError: The answer would be too large.
    """
    dim = dim if request.vectors else 0
    if len(request.queries) * (request.k + dim) > MAX_ANSWER:
        vectors = f" and vectors of {dim} numbers" if dim else ""
        wanted = f"{len(request.queries):,} queries, {request.k:,} items for each{vectors}"
        raise RequestError(413, f"{wanted} exceed the limit of {MAX_ANSWER:,} per request; split the request")


def _history(query: Query, seen_column: str | None) -> Ids:
    """The items of a query's history."""
    items = query.history if query.row is None or seen_column is None else query.row.get(seen_column)
    return [item for item in items if isinstance(item, int | str)] if isinstance(items, list) else []


def check_index(folder: Path) -> None:
    """Checks that an export has an index, and that its queries are within their limits, without loading it.

    Raises:
        ExportError: It does not.
    """
    export = read_index(folder)
    export.item_index(folder)
    if export.targets:
        check_parity(folder)


def _parse(body: bytes) -> Request:
    """
    Raises:
        RequestError: The body is not valid JSON, or has the wrong fields.
    """
    try:
        return Request.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        if problem["type"] == "json_invalid":
            raise RequestError(400, f"the body is not valid JSON: {problem['msg'][:200]}") from None
        field = ".".join(map(str, problem["loc"]))
        text = f"{field}: {problem['msg'].removeprefix('Value error, ')}" if field else problem["msg"]
        raise RequestError(422, f'{text}; send {{"queries": [{{"history": [ids]}}]}}') from None
