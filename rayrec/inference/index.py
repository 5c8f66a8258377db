"""The folder of an index: item vectors, their ids and attributes, perhaps a query tower and an approximate index.

| file | |
|---|---|
| `index.json` | version, sizes, search and its measured recall, size and checksum of every file; written last |
| `vectors.bin` | float32 `[I, D]`, mapped into memory |
| `items.parquet` | the id of each row, and attributes to filter by |
| `tower.pt` | the query tower, with queries that prove it; `mapping.json` and `vocabularies/` of the rows it reads |
| `approximate.faiss` | IVF or HNSW over the same vectors |

One version names all of it, so that a query never meets vectors of another training.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from rayrec.inference import artifact
from rayrec.inference.artifact import ExportError
from rayrec.inference.topk import KINDS, Approximate, top_k
from rayrec.inference.tower import TOWER, Tower
from rayrec.metrics.ranking import Jagged

if TYPE_CHECKING:
    from rayrec.data.mapping.arrow_input import Tabular

INDEX, VECTORS, ITEMS, APPROXIMATE = "index.json", "vectors.bin", "items.parquet", "approximate.faiss"
TUNING_QUERIES = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """What `index.json` says.

    Args:
        version: unique.
        items, dim: of the vectors.
        search: "exact", "ivf" or "hnsw".
        effort: lists probed (IVF) or nodes kept (HNSW).
        k, recall: of the approximate index against exact search, for `tuned_on`; None for exact search.
        speedup: exact search's time over its.
        apart: queries of the tower, as it is served, from those of the model as it was trained (`tower.difference`).
        files: path → (bytes, CRC-32).
    """

    version: str
    items: int
    dim: int
    search: str
    files: dict[str, tuple[int, int]]
    effort: int | None = None
    k: int | None = None
    recall: float | None = None
    speedup: float | None = None
    tuned_on: str | None = None
    apart: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """How an index searches.

    Args:
        kind: "exact"; "ivf" or "hnsw" need rayrec[index].
        recall: of the exact k best that an approximate index must find, at least, on average.
        k: at which it is tuned.
    """

    kind: str = "exact"
    recall: float = 0.98
    k: int = 100

    def __post_init__(self) -> None:
        if self.kind != "exact" and self.kind not in KINDS:
            raise ValueError(f"search {self.kind!r}: there are exact, {', '.join(KINDS)}")
        if not 0 < self.recall <= 1:
            raise ValueError(f"recall={self.recall} must lie above 0 and at most at 1")


def write_index(
    folder: Path,
    vectors_ID: torch.Tensor,
    items: pa.Table,
    *,
    search: Search | None = None,
    tower: Tower | None = None,
    queries: torch.Tensor | None = None,
    apart: float | None = None,
) -> IndexReport:
    """Writes an index; the folder appears when it is whole.

    Args:
        folder: not there yet.
        vectors_ID: one for each row of `items`.
        items: ids in its first column, each once; others are attributes.
        tower: its item rows are those of `items`.
        queries: an approximate index is tuned with these; None: with vectors of drawn items.
        apart: for the report.

    Raises:
        ExportError: the folder is there, vectors and ids do not fit, or a vector is not finite.
    """
    search, folder = search or Search(), Path(folder)
    if folder.exists():
        raise ExportError(f"{folder} is there already; give another name, so that a service may take over from it")
    _check(vectors_ID, items)
    scratch = folder.with_name(f".{folder.name}-{uuid.uuid4().hex[:6]}")
    scratch.mkdir(parents=True)
    vectors = vectors_ID.detach().float().contiguous()
    vectors.numpy().tofile(scratch / VECTORS)
    pq.write_table(items, scratch / ITEMS)
    if tower is not None:
        tower.write(scratch)
    found: dict[str, Any] = {}
    if search.kind != "exact":
        found = _approximate(scratch, vectors, search, queries)
    report = IndexReport(
        version=f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}",
        items=len(vectors),
        dim=vectors.shape[1],
        search=search.kind,
        files=artifact.listed_files(scratch),
        apart=apart,
        **found,
    )
    artifact.write_json(scratch / INDEX, asdict(report))
    scratch.rename(folder)
    return report


def _check(vectors: torch.Tensor, items: pa.Table) -> None:
    ids = items.column(0)
    if vectors.dim() != 2 or len(vectors) != len(items) or not len(vectors):
        raise ExportError(f"vectors are {list(vectors.shape)} for {len(items):,} items; one vector an item is needed")
    if ids.null_count or pc.count_distinct(ids).as_py() != len(ids):
        raise ExportError(f"column {items.column_names[0]!r}: an id is missing or comes twice; each item needs its own")
    bad = (~vectors.isfinite()).any(1).nonzero()
    if len(bad):
        raise ExportError(f"item {ids[int(bad[0])].as_py()!r}: its vector is not finite; look at the training")


def _approximate(folder: Path, vectors: torch.Tensor, search: Search, queries: torch.Tensor | None) -> dict[str, Any]:
    tuned_on = "given queries"
    if queries is None:
        tuned_on = "vectors of drawn items"
        drawn = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))
        queries = vectors[drawn[:TUNING_QUERIES]]
    index = Approximate.build(search.kind, vectors)
    k = min(search.k, len(vectors))
    begin = time.perf_counter()
    _, exact = top_k(queries, vectors, k)
    exact_s = time.perf_counter() - begin
    recall, seconds = index.tune(queries, exact, search.recall)
    index.write(folder / APPROXIMATE)
    return {
        "effort": index.effort,
        "k": k,
        "recall": round(recall, 5),
        "speedup": round(exact_s / max(seconds, 1e-9), 2),
        "tuned_on": tuned_on,
    }


class Index:
    """An index, loaded to search. Threads may share one.

    Raises:
        ExportError: no whole index, a damaged file, or faiss is missing.
    """

    def __init__(self, folder: str | Path, checksums: bool = True) -> None:
        self.folder = Path(folder)
        self.report = read_report(self.folder)
        artifact.check_listed(self.folder, self.report.files, checksums)
        shape = (self.report.items, self.report.dim)
        held = np.memmap(self.folder / VECTORS, dtype=np.float32, mode="c", shape=shape)
        self.vectors = torch.from_numpy(held)
        self.items = pq.read_table(self.folder / ITEMS)
        self._row_of = {one: row for row, one in enumerate(self.items.column(0).to_pylist())}
        self.tower = Tower.read(self.folder) if (self.folder / TOWER).exists() else None
        self._approximate = None
        if self.report.search != "exact":
            self._approximate = Approximate.read(self.report.search, self.folder / APPROXIMATE, self.report.effort or 1)
        self._allowed = lru_cache(maxsize=64)(self._rows_allowed)

    def rows_of(self, ids: Sequence[Any]) -> list[int]:
        """The rows of ids; ids that the corpus does not have are left out."""
        return [self._row_of[one] for one in ids if one in self._row_of]

    def queries(self, histories: Sequence[Sequence[Any]]) -> torch.Tensor:
        """`[Q, D]` for histories of ids, oldest first; those that the model does not know are left out.

        Raises:
            ValueError: the index has no query tower, or one that reads more.
        """
        tower = self._tower()
        if tower.mapping is None:
            known = tower.model.num_items
            return tower.queries([[row for row in self.rows_of(one) if row < known] for one in histories])
        columns = tower.mapping.schema.feature_columns
        if columns != [self.seen_column]:
            raise ValueError(f"the model reads {columns}, not a history alone: send rows of these columns")
        rows = {columns[0]: pa.array([[one for one in ids if one in self._row_of] for ids in histories], self._list)}
        return self.queries_of(pa.table(rows))

    def queries_of(self, rows: Tabular) -> torch.Tensor:
        """`[Q, D]` for rows of the columns that training read.

        Raises:
            ValueError: the index is of no run, or a row cannot be mapped; names column, row and fix.
        """
        mapping = self._tower().mapping
        if mapping is None:
            raise ValueError(f"{self.folder} was not made from a run: send histories or vectors")
        batch, errors = mapping.to_batch_and_errors(rows)
        if errors:
            raise ValueError(f"query {min(errors)}: {errors[min(errors)]}")
        return self._tower().queries(batch)

    @property
    def seen_column(self) -> str | None:
        """The column of items that a row has seen, where the tower reads rows that have one."""
        if self.tower is None or self.tower.mapping is None or self.tower.model.reads.seen is None:
            return None
        of = {feature.name: feature.column for feature in self.tower.mapping.schema.sparse}
        return of[self.tower.model.reads.seen]

    @property
    def _list(self) -> pa.DataType:
        return pa.list_(self.items.column(0).type)

    def _tower(self) -> Tower:
        if self.tower is None:
            raise ValueError(f"{self.folder} has no query tower: send vectors, or make the index from a model")
        return self.tower

    def extended(self, folder: Path, vectors: torch.Tensor, items: pa.Table) -> IndexReport:
        """Writes an index of these items and of `items`, with the same tower and search; nothing is trained.

        Raises:
            ExportError: an item is there already, or has another width or other columns.
        """
        if vectors.shape[1] != self.report.dim or items.column_names != self.items.column_names:
            raise ExportError(
                f"{self.folder} has vectors of {self.report.dim} numbers and columns {self.items.column_names}; those "
                f"to append have {vectors.shape[1]} and {items.column_names}"
            )
        whole = pa.concat_tables([self.items, items.cast(self.items.schema)])
        report = self.report
        search = Search(kind=report.search, recall=report.recall or 1.0, k=report.k or 1)
        both = torch.cat([self.vectors, vectors])
        return write_index(folder, both, whole, search=search, tower=self.tower, apart=report.apart)

    def search(
        self,
        queries_QD: torch.Tensor,
        k: int,
        exclude: Sequence[Sequence[Any]] | None = None,
        where: Mapping[str, Sequence[Any]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(scores `[Q, k]`, rows `[Q, k]`), best first; -inf and -1 where there are no more.

        Args:
            exclude: for each query, ids that it must not get.
            where: attribute → its allowed values; such a search is exact.

        Raises:
            ValueError: no such attribute, or queries of another width.
        """
        if queries_QD.dim() != 2 or queries_QD.shape[1] != self.report.dim:
            raise ValueError(f"queries are {list(queries_QD.shape)}; this index takes [Q, {self.report.dim}]")
        rows = [self.rows_of(ids) for ids in exclude or ()]
        excluded = None
        if any(rows):
            offsets = torch.tensor([0, *(len(one) for one in rows)]).cumsum(0)
            excluded = Jagged(torch.tensor([row for one in rows for row in one]), offsets)
        allowed = self._allowed(tuple((name, tuple(values)) for name, values in where.items())) if where else None
        k = min(k, self.report.items)
        if self._approximate is None or allowed is not None:
            return top_k(queries_QD, self.vectors, k, excluded, allowed)
        return self._approximate.search(queries_QD, k, excluded)

    def _rows_allowed(self, where: tuple[tuple[str, tuple[Any, ...]], ...]) -> torch.Tensor:
        allowed = np.ones(self.report.items, dtype=bool)
        for name, values in where:
            if name not in self.items.column_names:
                raise ValueError(f"there is no attribute {name!r} to filter by; there are {self.items.column_names}")
            column = self.items.column(name)
            try:
                wanted = pa.array(values, type=column.type)
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise ValueError(f"filter {name!r}: {error}") from None
            allowed &= pc.is_in(column, wanted).to_numpy(zero_copy_only=False)
        return torch.from_numpy(allowed)

    def ids_of(self, rows: torch.Tensor) -> list[list[Any]]:
        """The ids of `[Q, k]` rows, without -1."""
        column = self.items.column(0)
        return [column.take(pa.array(one[one >= 0].numpy())).to_pylist() for one in rows]


def read_report(folder: Path) -> IndexReport:
    """
    Raises:
        ExportError: no whole index is there.
    """
    try:
        raw = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in raw.pop("files").items()}
        return IndexReport(files=files, **raw)
    except FileNotFoundError:
        raise ExportError(f"{folder} holds no whole index: it has no {INDEX}; make one with `rayrec index`") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(f"{folder / INDEX} is not the report of an index ({error}): index anew") from None
