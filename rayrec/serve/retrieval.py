"""`POST /retrieve`: the best items for histories or vectors, from an index. Knows no HTTP."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import pyarrow as pa
import torch
from pydantic import Field, ValidationError, model_validator

from rayrec.data.strict import Strict
from rayrec.inference.artifact import ExportError, check_listed
from rayrec.inference.index import INDEX, Index, read_report
from rayrec.serve.errors import RequestError
from rayrec.serve.limits import Limits

MOST_K = 1000
_UNREADABLE = (pa.ArrowException, TypeError, ValueError, OverflowError, KeyError)
Ids = list[int | str]
Number = Annotated[float, Field(gt=-1e30, lt=1e30, allow_inf_nan=False)]


class Query(Strict):
    """What items are searched for."""

    history: Ids | None = None
    vector: list[Number] | None = None
    row: dict[str, Any] | None = None
    exclude: Ids = Field([])

    @model_validator(mode="after")
    def _check(self) -> Query:
        if (self.history, self.vector, self.row).count(None) != 2:
            raise ValueError("give either history or vector, or a row of the columns that training read")
        return self

    @property
    def kind(self) -> str:
        return "row" if self.row is not None else "history" if self.vector is None else "vector"


class Asked(Strict):
    """A request."""

    queries: list[Query]
    k: Annotated[int, Field(ge=1, le=MOST_K)] = 10
    filter: dict[str, list[str | int | bool | Number]] | None = None
    keep_seen: bool = False
    vectors: bool = False


class Retrieval:
    """Answers requests from one index.

    A request is JSON: `{"queries": [{"history": [ids], "exclude": [ids]}], "k": 10, "filter": {"column": [values]},
    "keep_seen": false, "vectors": false}`; a query may have a `vector` in place of `history`, or a `row`: an object of
    the columns that the run's query tower reads. Items of a history are left out unless `keep_seen`; with `vectors`
    each result has the vector of its query.

    Raises:
        ExportError: no whole index.
    """

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.index, self.limits = Index(folder), limits or Limits()

    def answer(self, body: bytes) -> bytes:
        """
        Raises:
            RequestError: the request is wrong, in any way.
        """
        asked = _parsed(body)
        self.limits.check_rows(len(asked.queries))
        seen_column = self.index.seen_column
        histories = [_history(query, seen_column) for query in asked.queries]
        seen = [[] if asked.keep_seen else history for history in histories]
        exclude = [[*history, *query.exclude] for history, query in zip(seen, asked.queries, strict=True)]
        lists = [value for query in asked.queries for value in (query.row or {}).values() if isinstance(value, list)]
        self.limits.check_ids(sum(map(len, exclude)) + sum(map(len, histories)) + sum(map(len, lists)))
        try:
            queries = self._queries(asked.queries, histories)
            scores, rows = self.index.search(queries, asked.k, exclude, asked.filter)
        except _UNREADABLE as error:
            raise RequestError(422, str(error)[:300]) from None
        results = [
            {"ids": ids, "scores": [float(f"{score:.9g}") for score in of_query[: len(ids)]]}
            for ids, of_query in zip(self.index.ids_of(rows), scores.tolist(), strict=True)
        ]
        if asked.vectors:
            results = [{**one, "vector": of_query} for one, of_query in zip(results, queries.tolist(), strict=True)]
        return json.dumps({"version": self.index.report.version, "results": results}, default=str).encode()

    def _queries(self, queries: Sequence[Query], histories: Sequence[Ids]) -> torch.Tensor:
        """
        Raises:
            ValueError: they are neither all histories nor all rows nor all vectors of the index's length.
        """
        vectors, dim = [query.vector for query in queries if query.vector is not None], self.index.report.dim
        rows = [query.row for query in queries if query.row is not None]
        if len({query.kind for query in queries}) > 1:
            raise ValueError("queries are all histories or all vectors, or all rows")
        if rows:
            return self.index.queries_of(rows)
        if not vectors:
            return self.index.queries(histories)
        for place, vector in enumerate(vectors):
            if len(vector) != dim:
                raise ValueError(f"query {place}: vector must be {dim} finite numbers")
        return torch.tensor(vectors)


def _history(query: Query, seen_column: str | None) -> Ids:
    """The items that a query has seen."""
    given = query.history if query.row is None or seen_column is None else query.row.get(seen_column)
    return [one for one in given if isinstance(one, int | str)] if isinstance(given, list) else []


def newest_index(path: Path) -> Path:
    """The index that a path stands for: itself, or of a folder of indexes the last by name.

    Raises:
        ExportError: there is none.
    """
    found = [path] if (path / INDEX).exists() else sorted(inner.parent for inner in path.glob(f"*/{INDEX}"))
    if not found:
        raise ExportError(f"{path} holds no index, neither {INDEX} nor a folder with one: make one with `rayrec index`")
    return found[-1]


def check_index(folder: Path) -> None:
    """That an index is whole, without loading it.

    Raises:
        ExportError: it is not.
    """
    check_listed(folder, read_report(folder).files)


def _parsed(body: bytes) -> Asked:
    """
    Raises:
        RequestError: no JSON, or not what is asked.
    """
    try:
        return Asked.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        if first["type"] == "json_invalid":
            raise RequestError(400, f"the body is no JSON: {first['msg'][:200]}") from None
        place = ".".join(map(str, first["loc"]))
        text = f"{place}: {first['msg'].removeprefix('Value error, ')}" if place else first["msg"]
        raise RequestError(422, f'{text}; send {{"queries": [{{"history": [ids]}}]}}') from None
