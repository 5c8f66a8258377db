"""`POST /retrieve`: the best items for histories or vectors, from an index. Knows no HTTP."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from rayrec.inference.artifact import ExportError, check_listed
from rayrec.inference.index import INDEX, Index, read_report
from rayrec.serve.errors import BadRequest
from rayrec.serve.limits import Limits

MOST_K = 1000
KEYS = {"queries", "k", "filter", "keep_seen"}
QUERY_KEYS = {"history", "vector", "exclude"}


class Retrieval:
    """Answers requests from one index.

    A request is JSON: `{"queries": [{"history": [ids], "exclude": [ids]}], "k": 10, "filter": {"column": [values]},
    "keep_seen": false}`; a query may have a `vector` in place of `history`. Items of a history are left out unless
    `keep_seen`.

    Raises:
        ExportError: no whole index.
    """

    def __init__(self, folder: Path, limits: Limits | None = None) -> None:
        self.index, self.limits = Index(folder), limits or Limits()

    def answer(self, body: bytes) -> bytes:
        """
        Raises:
            BadRequest: the request is wrong, in any way.
        """
        asked = _parsed(body)
        queries = asked.get("queries")
        if not isinstance(queries, list):
            raise BadRequest(422, 'give "queries": a list of {"history": [ids]} or {"vector": [numbers]}')
        self.limits.check_rows(len(queries))
        k, keep_seen = asked.get("k", 10), asked.get("keep_seen", False)
        if type(k) is not int or not 1 <= k <= MOST_K:
            raise BadRequest(422, f"k: give a whole number from 1 to {MOST_K}")
        if type(keep_seen) is not bool:
            raise BadRequest(422, "keep_seen: give true or false")
        histories, vectors, exclude = self._read(queries, keep_seen)
        try:
            found = self.index.queries(histories) if vectors is None else vectors
            scores, rows = self.index.search(found, k, exclude, _filter(asked.get("filter")))
        except ValueError as error:
            raise BadRequest(422, str(error)) from None
        results = [
            {"ids": ids, "scores": [float(f"{score:.9g}") for score in of_query[: len(ids)]]}
            for ids, of_query in zip(self.index.ids_of(rows), scores.tolist(), strict=True)
        ]
        return json.dumps({"version": self.index.report.version, "results": results}, default=str).encode()

    def _read(
        self, queries: Sequence[Any], keep_seen: bool
    ) -> tuple[list[list[Any]], torch.Tensor | None, list[list[Any]]]:
        """(histories, vectors if the queries are such, what each must not get)."""
        histories, vectors, exclude = [], [], []
        for place, query in enumerate(queries):
            if not isinstance(query, dict) or not query.keys() <= QUERY_KEYS:
                raise BadRequest(422, f"query {place}: an object with some of {sorted(QUERY_KEYS)} is needed")
            if ("history" in query) == ("vector" in query):
                raise BadRequest(422, f"query {place}: give either history or vector")
            history, more = (_ids(query.get(key, []), f"query {place}: {key}") for key in ("history", "exclude"))
            histories.append(history)
            exclude.append(more if keep_seen else [*history, *more])
            if "vector" in query:
                vectors.append(self._vector(query["vector"], place))
        self.limits.check_ids(sum(map(len, exclude)) + sum(map(len, histories)))
        if vectors and len(vectors) < len(queries):
            raise BadRequest(422, "queries are all histories or all vectors")
        return histories, torch.tensor(vectors) if vectors else None, exclude

    def _vector(self, value: Any, place: int) -> list[float]:
        dim = self.index.report.dim
        good = isinstance(value, list) and len(value) == dim and all(type(one) in (int, float) for one in value)
        if not good or not all(abs(one) < 1e30 for one in value):  # NaN is in no order
            raise BadRequest(422, f"query {place}: vector must be {dim} finite numbers")
        return [float(one) for one in value]


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


def _parsed(body: bytes) -> dict[str, Any]:
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise BadRequest(400, f"the body is no JSON: {str(error)[:200]}") from None
    if not isinstance(asked, dict) or not asked.keys() <= KEYS:
        raise BadRequest(422, f"the body must be an object with some of {sorted(KEYS)}")
    return asked


def _ids(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not all(type(one) in (int, str) for one in value):
        raise BadRequest(422, f"{where} must be a list of ids")
    return value


def _filter(value: Any) -> dict[str, list[Any]] | None:
    if value is None:
        return None
    plain = (str, int, bool, float)
    good = isinstance(value, dict) and all(
        isinstance(values, list)
        and all(type(one) in plain and one == one and one not in (math.inf, -math.inf) for one in values)
        for values in value.values()
    )
    if not good:
        raise BadRequest(422, 'filter: give {"column": [values]}')
    filters: dict[str, list[Any]] = value
    return filters
