"""`POST /retrieve`: the best items for histories or vectors, from an index, ranked if it has a ranker. Independent of
HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from pydantic import Field, ValidationError, model_validator

from rayrec._runtime.strict import Strict
from rayrec.inference.artifact import RANKER, ExportError, read_index
from rayrec.inference.index import ItemIndex
from rayrec.serve.errors import RequestError, not_finite
from rayrec.serve.limits import Limits
from rayrec.serve.requests import Mapped
from rayrec.serve.requests import Query as ScoredQuery
from rayrec.serve.versions import Loaded, Versions, check_parity, check_scores, load
from rayrec.storage.cache import CACHE_BYTES, Held

MAX_K = 1000
# Numbers and ids of an answer: each is a Python object for a while, and about 20 bytes of JSON.
MAX_ANSWER = 1_000_000
_UNREADABLE = (pa.ArrowException, TypeError, ValueError, OverflowError, KeyError)
Ids = list[int | str]
Ranking = dict[str, npt.NDArray[np.float32]]  # the scores of one query's items, by label
Number = Annotated[float, Field(gt=-1e30, lt=1e30, allow_inf_nan=False)]


@dataclass(frozen=True, slots=True)
class Ranked:
    """Queries whose items a ranker has scored, mapped as one batch.

    Args:
        version: Of the index.
        places: Places of the queries in the request.
        queries: With the items found as candidates.
        ids: Their ids, of all queries one after the other.
        scores: Of all rows.
    """

    loaded: Loaded
    version: str
    places: Sequence[int]
    queries: Sequence[ScoredQuery]
    ids: pa.ChunkedArray
    mapped: Mapped
    scores: Ranking


class Query(Strict):
    """A query: a history, a vector, or a row; and its time, in seconds since 1970 or as ISO 8601 text (default UTC)."""

    history: Ids | None = None
    vector: list[Number] | None = None
    row: dict[str, Any] | None = None
    exclude: Ids = Field([])
    context: dict[str, Any] = Field({})
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


class Rank(Strict):
    """How to rank the items found: by the scores for a label, and how many to answer with."""

    by: str | None = None
    k: Annotated[int, Field(ge=1, le=MAX_K)] | None = None


class Request(Strict):
    """A request; `Retrieval` describes its fields."""

    queries: list[Query]
    k: Annotated[int, Field(ge=1, le=MAX_K)] = 10
    filter: dict[str, list[str | int | bool | Number]] | None = None
    keep_seen: bool = False
    vectors: bool = False
    rank: Rank | None = None

    @model_validator(mode="after")
    def _check(self) -> Request:
        if self.rank is None and any(query.context for query in self.queries):
            raise ValueError("`context` is for the ranker: send `rank` too")
        return self


@dataclass(frozen=True, slots=True)
class LoadedIndex:
    """A loaded version of an index with its query tower.

    Args:
        ranker: Scores the items found; None: the export has none.
        export: Keeps the version's files in the cache.
    """

    index: ItemIndex
    ranker: Loaded | None
    export: Held

    @property
    def version(self) -> str:
        return self.index.version

    @property
    def folder(self) -> Path:
        return self.index.folder


def load_index(export: Held, limits: Limits) -> LoadedIndex:
    """Loads a version; its checksums must have been checked.

    Raises:
        ExportError: The export has no index, its queries or its ranker's scores are outside their limits, or the ranker
            cannot read the items.
    """
    check_index(export.folder)
    index = ItemIndex(export.folder, checksums=False)
    if index.export.ranker is None:
        return LoadedIndex(index, None, export)
    ranker = load(export, limits, export.folder / RANKER)
    try:
        ranker.reader.check_candidates(_candidates(index, ranker).slice(0, 1))
    except RequestError as error:
        raise ExportError(f"{export.folder}: the ranker cannot read the items: {error.text}") from None
    return LoadedIndex(index, ranker, export)


def _candidates(index: ItemIndex, ranker: Loaded) -> pa.Table:
    """The columns of the items that the ranker reads."""
    columns = set(ranker.reader.schema.feature_columns)
    return index.items.select([name for name in index.items.column_names if name in columns])


class Retrieval:
    """Answers requests from the newest version of an index.

    A request is JSON: `{"queries": [{"history": [ids], "exclude": [ids]}], "k": 10, "filter": {"column": [values]},
    "keep_seen": false, "vectors": false, "rank": {"by": "label", "k": 5}}`. Instead of `history`, a query may have a
    `vector`, or a `row`: an object with the columns that the query tower reads; with `time`, a model that reads times
    answers as of then, else as of the newest item. Results exclude the items of the history unless `keep_seen`. With
    `vectors`, each result includes the vector of its query.

    A result has `ids` and `scores`, best first, and `known`, the number of ids of the history that the model knows. If
    nothing of a query is known, so that all items have the same score, `ids` is empty.

    With `rank`, the ranker of the export scores the `k` items of each query, and a result has the `rank.k` best of them
    (default: all) by the label `rank.by` (default: the first): also `ranking`, the scores for each label. The ranker
    reads the items' columns from the index, and all others from the query's history or row, and its `context`, an
    object of columns.

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
        self.versions = Versions(path, partial(load_index, limits=self.limits), on_change, cache_bytes)

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
            entry["ranker"] = index.export.ranker
        return entry

    def answer(self, body: bytes, log: Callable[[Ranked], object] = lambda _: None) -> bytes:
        """
        Args:
            log: Is called with the queries that were ranked.

        Raises:
            RequestError: The request is wrong.
        """
        request, active = _parse(body), self.versions.active  # read once: a request keeps one version until its end
        index, ranker = active.index, active.ranker
        self.limits.check_rows(len(request.queries))
        seen_column = index.seen_column
        _check_answer(request, index.report.dim)
        if request.rank is not None:
            ranker = _ranker(ranker, request.rank)
            self.limits.check_rows(len(request.queries) * min(request.k, index.report.items))
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
        ranking: list[Ranking] = []
        if ranker is not None and request.rank is not None:
            contexts = [_context(query, index, ranker) for query in request.queries]
            ranking = _ranked(index, ranker, contexts, rows, log)
            scores, rows = _in_order(ranking, scores, rows, request.rank)
        results: list[dict[str, Any]] = [
            {"ids": ids, "scores": _rounded(query_scores[: len(ids)])}
            for ids, query_scores in zip(index.ids_of(rows), scores.tolist(), strict=True)
        ]
        for result, by_label in zip(results, ranking, strict=bool(ranking)):
            result["ranking"] = {label: _rounded(values.tolist()) for label, values in by_label.items()}
        if known is not None:
            results = [{**result, "known": count} for result, count in zip(results, known, strict=True)]
        if request.vectors:
            results = [{**result, "vector": vector} for result, vector in zip(results, queries.tolist(), strict=True)]
        return json.dumps({"version": index.version, "results": results}, default=str).encode()


def _rounded(numbers: Sequence[float]) -> list[float]:
    """Numbers with the digits of a float32."""
    return [float(f"{number:.9g}") for number in numbers]


def _ranker(ranker: Loaded | None, rank: Rank) -> Loaded:
    """
    Raises:
        RequestError: There is no ranker, or the label is unknown.
    """
    if ranker is None:
        raise RequestError(422, "the index has no ranker: write it with `rayrec index … --ranker EXPORT`")
    if rank.by is not None and rank.by not in ranker.model.labels:
        raise RequestError(422, f"rank.by: unknown label {rank.by!r}; the ranker has {', '.join(ranker.model.labels)}")
    return ranker


def _context(query: Query, index: ItemIndex, ranker: Loaded) -> dict[str, Any]:
    """The columns of a query that its candidates share.

    Raises:
        RequestError: A column is in the items too, or comes twice.
    """
    own = dict(query.row or {})
    if query.history is not None and index.seen_column is not None:
        own[index.seen_column] = query.history
    if twice := sorted(own.keys() & query.context.keys()):
        raise RequestError(422, f"column {twice[0]!r} is in the context and in the query; send it once")
    columns = set(ranker.reader.schema.feature_columns)
    context = {name: value for name, value in {**own, **query.context}.items() if name in columns}
    if twice := sorted(context.keys() & set(index.items.column_names)):
        raise RequestError(422, f"column {twice[0]!r} is in the query and in the items of the index; leave it out")
    return context


def _ranked(
    index: ItemIndex,
    ranker: Loaded,
    contexts: Sequence[dict[str, Any]],
    rows: torch.Tensor,
    log: Callable[[Ranked], object],
) -> list[Ranking]:
    """The scores of the items found for each query.

    Args:
        rows: `[Q, k]`, padded with -1 at the end.

    Raises:
        RequestError: A context cannot be mapped, or a score is not finite.
    """
    items, counts = _candidates(index, ranker), (rows >= 0).sum(1).tolist()
    ranking: list[Ranking] = [{label: np.empty(0, np.float32) for label in ranker.model.labels} for _ in counts]
    by_form: dict[frozenset[str], list[int]] = {}  # contexts with other columns are mapped apart
    for number, count in enumerate(counts):
        if count:
            by_form.setdefault(frozenset(contexts[number]), []).append(number)
    for form, numbers in by_form.items():
        found = pa.array(rows[numbers][rows[numbers] >= 0].numpy())
        candidates = items.take(found)
        starts = np.cumsum([0, *(counts[number] for number in numbers)])
        queries = [
            ScoredQuery(contexts[number], candidates.slice(start, counts[number]), counts[number], form)
            for number, start in zip(numbers, starts.tolist(), strict=False)
        ]
        mapped, outputs = _outputs(ranker, queries, numbers)
        log(Ranked(ranker, index.version, numbers, queries, index.items.column(0).take(found), mapped, outputs))
        for number, start in zip(numbers, starts.tolist(), strict=False):
            own = slice(start, start + counts[number])
            ranking[number] = {label: values[own] for label, values in outputs.items()}
    return ranking


def _outputs(ranker: Loaded, queries: Sequence[ScoredQuery], numbers: Sequence[int]) -> tuple[Mapped, Ranking]:
    """The mapped queries, and the scores of their rows.

    Args:
        numbers: Of the queries in the request, for messages.

    Raises:
        RequestError: A query cannot be mapped, or a score is not finite.
    """
    try:
        mapped = ranker.reader.map(queries)
        outputs = ranker.model.outputs(mapped.batch, mapped.shared)
    except (RequestError, ValueError) as error:
        if len(queries) > 1:  # the message is of the rows of all
            for query, number in zip(queries, numbers, strict=True):
                _outputs(ranker, [query], [number])
        status, text = (error.status, error.text) if isinstance(error, RequestError) else (422, str(error))
        raise RequestError(status, f"query {numbers[0]}: ranking its items: {text}") from error
    finite = np.logical_and.reduce([np.isfinite(values) for values in outputs.values()])
    if not finite.all():
        raise not_finite(finite)
    return mapped, outputs


def _in_order(
    ranking: list[Ranking], scores: torch.Tensor, rows: torch.Tensor, rank: Rank
) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores and rows `[Q, rank.k]` in the order of the ranking, best first; orders and cuts the ranking as well."""
    k = min(rank.k or rows.shape[1], rows.shape[1])
    orders = torch.arange(rows.shape[1]).repeat(len(rows), 1)  # the padding stays at the end
    for number, by_label in enumerate(ranking):
        by = by_label[rank.by or next(iter(by_label))]
        order = np.argsort(-by, kind="stable")
        orders[number, : len(order)] = torch.from_numpy(order)
        ranking[number] = {label: values[order[:k]] for label, values in by_label.items()}
    orders = orders[:, :k]
    return scores.gather(1, orders), rows.gather(1, orders)


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
    if export.ranker is not None:
        check_scores(folder / RANKER)
        check_parity(folder / RANKER)


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
