"""The folder of an index: item vectors with ids and attributes, and optionally a query tower and an approximate index.

| file | |
|---|---|
| `index.json` | version, sizes, kind of search and its measured recall, size and checksum of every file; written last |
| `vectors.bin` | float32 `[I, D]`, mapped into memory |
| `items.parquet` | id and attributes of each row |
| `tower.pt` | the query tower, with queries to verify it; `mapping.json`, `vocabularies/`: the mapping of its rows |
| `approximate.faiss`, `tuning.pt` | IVF or HNSW over the same vectors, and the queries that it was tuned with |

All of them share one version, so that queries and vectors are always of the same training.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from rayrec.data.arrays.arrow_types import is_text
from rayrec.inference import artifact
from rayrec.inference.artifact import ExportError
from rayrec.inference.topk import KINDS, NO_SCORE, Approximate, top_k
from rayrec.inference.tower import TOWER, ItemRows, Tower
from rayrec.metrics.ranking import Jagged

if TYPE_CHECKING:
    from rayrec.data.mapping.arrow_input import Tabular

INDEX_JSON, VECTORS, ITEMS = "index.json", "vectors.bin", "items.parquet"
APPROXIMATE, TUNING = "approximate.faiss", "tuning.pt"
TUNING_QUERIES = 256
OF_ITEMS = "vectors of random items"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexReport:
    """`index.json`.

    Args:
        version: Unique name.
        items, dim: Shape of the vectors.
        search: "exact", "ivf" or "hnsw".
        files: path → (bytes, CRC-32).
        effort: Lists to probe (IVF) or candidates to keep (HNSW), for `k`.
        k, recall: Recall of the approximate index at k, measured with the queries in `tuned_on`; None for exact search.
        tuned: (k, effort, recall) for `k` and the largest k.
        target_recall: The recall that was asked for.
        speedup: Time of exact search divided by the time of the approximate index, for `k`.
        tuned_on: A description of the queries.
        apart: Maximum difference between queries of the stored tower and the trained model (`tower.difference`).
        overlap: Share of the trained model's ten best items that the stored tower finds.
        left_out: Items that were not indexed, because the model does not know them.
    """

    version: str
    items: int
    dim: int
    search: str
    files: dict[str, tuple[int, int]]
    effort: int | None = None
    k: int | None = None
    recall: float | None = None
    tuned: tuple[tuple[int, int, float], ...] = ()
    target_recall: float | None = None
    speedup: float | None = None
    tuned_on: str | None = None
    apart: float | None = None
    overlap: float | None = None
    left_out: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """The kind of search of an index.

    Args:
        kind: "exact"; or "ivf" or "hnsw", which need rayrec[index].
        recall: Minimum mean recall of an approximate index.
        k: Number of results that the recall is measured with.
        max_k: The largest number of results of a query; the recall is reached for it as well.
    """

    kind: str = "exact"
    recall: float = 0.98
    k: int = 100
    max_k: int = 1000

    def __post_init__(self) -> None:
        if self.kind != "exact" and self.kind not in KINDS:
            raise ValueError(f"search {self.kind!r}: must be exact, {' or '.join(KINDS)}")
        if not 0 < self.recall <= 1:
            raise ValueError(f"recall={self.recall} must be in (0, 1]")


@dataclass(frozen=True, slots=True)
class TuningQueries:
    """Queries to tune an approximate index with.

    Args:
        vectors: `[Q, D]`.
        seen: Rows of items that the answer to each query excludes.
        source: A description for the report.
    """

    vectors: torch.Tensor
    seen: Jagged | None = None
    source: str = "given queries"

    def write(self, path: Path) -> None:
        seen = None if self.seen is None else (self.seen.ids, self.seen.offsets)
        torch.save({"vectors": self.vectors, "seen": seen, "source": self.source}, path)

    @classmethod
    def read(cls, path: Path) -> TuningQueries:
        saved = torch.load(path, weights_only=True)
        seen = None if saved["seen"] is None else Jagged(*saved["seen"])
        return cls(saved["vectors"], seen, saved["source"])


def write_index(
    folder: Path,
    vectors_ID: torch.Tensor,
    items: pa.Table,
    *,
    search: Search | None = None,
    tower: Tower | None = None,
    queries: torch.Tensor | TuningQueries | None = None,
    apart: float | None = None,
    overlap: float | None = None,
    left_out: int = 0,
) -> IndexReport:
    """Writes an index. The folder appears complete, or not at all.

    Args:
        folder: Folder to create; must not exist.
        vectors_ID: A vector for each row of `items`.
        items: Unique ids in the first column; the other columns are attributes.
        tower: The query tower; its item rows are the rows of `items`.
        queries: Queries to tune an approximate index with; None: vectors of random items, which are found more easily
            than those of queries.
        apart, overlap, left_out: For the report.

    Raises:
        ExportError: The folder exists, vectors and items do not fit, or a vector is not finite.
    """
    search, folder = search or Search(), Path(folder)
    if folder.exists():
        raise ExportError(f"{folder} already exists; choose another name, so that a service can replace its index")
    _check(vectors_ID, items)
    folder.parent.mkdir(parents=True, exist_ok=True)
    vectors = vectors_ID.detach().float().contiguous()
    if isinstance(queries, torch.Tensor):
        queries = TuningQueries(queries)
    with artifact.scratch_folder(folder) as scratch:
        unfinished = scratch / "index"
        unfinished.mkdir()
        vectors.numpy().tofile(unfinished / VECTORS)
        pq.write_table(items, unfinished / ITEMS)
        if tower is not None:
            tower.write(unfinished)
        measured = {} if search.kind == "exact" else _approximate(unfinished, vectors, search, queries)
        report = IndexReport(
            version=f"{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:6]}",
            items=len(vectors),
            dim=vectors.shape[1],
            search=search.kind,
            files=artifact.listed_files(unfinished),
            apart=apart,
            overlap=overlap,
            left_out=left_out,
            **measured,
        )
        artifact.write_json(unfinished / INDEX_JSON, asdict(report))
        unfinished.rename(folder)
    return report


def _check(vectors: torch.Tensor, items: pa.Table) -> None:
    ids = items.column(0)
    if vectors.dim() != 2 or len(vectors) != len(items) or not len(vectors):
        raise ExportError(f"vectors have shape {list(vectors.shape)}, but there are {len(items):,} items")
    if ids.null_count or pc.count_distinct(ids).as_py() != len(ids):
        raise ExportError(f"column {items.column_names[0]!r}: an id is missing or comes twice; ids must be unique")
    bad = (~vectors.isfinite()).any(1).nonzero()
    if len(bad):
        raise ExportError(f"item {ids[int(bad[0])].as_py()!r}: its vector is not finite; check the training")


def _approximate(folder: Path, vectors: torch.Tensor, search: Search, queries: TuningQueries | None) -> dict[str, Any]:
    if queries is None:
        order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))
        queries = TuningQueries(vectors[order[:TUNING_QUERIES]], source=OF_ITEMS)
    else:
        queries.write(folder / TUNING)
    index = Approximate.build(search.kind, vectors)
    tuned, speedups = [], []
    for k in sorted({min(search.k, len(vectors)), min(max(search.k, search.max_k), len(vectors))}):
        begin = time.perf_counter()
        _, exact = top_k(queries.vectors, vectors, k, queries.seen)
        exact_s = time.perf_counter() - begin
        recall, seconds = index.tune(queries.vectors, exact, search.recall, queries.seen)
        tuned.append((k, index.effort(k), round(recall, 5)))
        speedups.append(round(exact_s / max(seconds, 1e-9), 2))
    index.write(folder / APPROXIMATE)
    (k, effort, recall), speedup = tuned[0], speedups[0]
    measured = {"k": k, "effort": effort, "recall": recall, "speedup": speedup, "tuned": tuned}
    return {**measured, "target_recall": search.recall, "tuned_on": queries.source}


class ItemIndex:
    """An index, loaded for search. Thread-safe.

    Raises:
        ExportError: The index is incomplete or damaged, or needs faiss, which is not installed.
    """

    def __init__(self, folder: str | Path, checksums: bool = True) -> None:
        self.folder = Path(folder)
        self.report = read_report(self.folder)
        artifact.check_listed(self.folder, self.report.files, checksums)
        shape = (self.report.items, self.report.dim)
        mapped = np.memmap(self.folder / VECTORS, dtype=np.float32, mode="c", shape=shape)
        self.vectors = torch.from_numpy(mapped)
        self.items = pq.read_table(self.folder / ITEMS).combine_chunks()  # rows are taken much faster from one chunk
        self._row_of = {id: row for row, id in enumerate(self.items.column(0).to_pylist())}
        self.tower = Tower.read(self.folder) if (self.folder / TOWER).exists() else None
        self._approximate = None
        if self.report.search != "exact":
            report = self.report
            efforts = [(k, effort) for k, effort, _ in report.tuned] or [(report.k or 1, report.effort or 1)]
            self._approximate = Approximate.read(report.search, self.folder / APPROXIMATE, efforts)
        self._allowed = lru_cache(maxsize=64)(self._rows_allowed)

    def rows_of(self, ids: Sequence[Any]) -> list[int]:
        """The rows of ids; ids that the index does not have are skipped."""
        return [self._row_of[id] for id in ids if id in self._row_of]

    def queries(self, histories: Sequence[Sequence[Any]]) -> torch.Tensor:
        """Query vectors `[Q, D]` of histories of ids, oldest first.

        Ids without a table row are skipped. The model may know items that the index does not have.

        Raises:
            ValueError: The index has no query tower, the tower reads more than a history, or an id has the wrong type.
        """
        return self.queries_and_known(histories)[0]

    def queries_and_known(self, histories: Sequence[Sequence[Any]]) -> tuple[torch.Tensor, list[int]]:
        """As `queries`, and how many ids of each history the model knows; see `known`."""
        self._check_ids(histories, "`history`")
        tower = self._tower()
        if tower.mapping is None:
            num_items = tower.model.num_items
            item_rows = [[row for row in self.rows_of(ids) if row < num_items] for ids in histories]
            return tower.queries(item_rows), [len(rows) for rows in item_rows]
        columns = tower.mapping.schema.feature_columns
        if columns != [self.seen_column]:
            raise ValueError(f"the model reads {columns}, not only a history: send rows with these columns")
        rows, known = self._mapped(histories)
        mapped = [[id for id in ids if rows[id] >= 0] for ids in histories]
        queries = self.queries_of(pa.table({columns[0]: pa.array(mapped, pa.list_(self._id_type))}))
        return queries, [sum(known[id] for id in ids) for ids in histories]

    def known(self, histories: Sequence[Sequence[Any]]) -> list[int]:
        """How many ids of each history the model knows; ids outside of its vocabulary are unknown."""
        tower = self._tower()
        if tower.mapping is None:
            return [sum(row < tower.model.num_items for row in self.rows_of(ids)) for ids in histories]
        if self.seen_column is None:
            return [0] * len(histories)
        _, known = self._mapped(histories)
        return [sum(known[id] for id in ids) for ids in histories]

    def _mapped(self, histories: Sequence[Sequence[Any]]) -> tuple[dict[Any, int], dict[Any, bool]]:
        """By id of the histories: its table row (-1: none), and whether the model knows it."""
        distinct = list(dict.fromkeys(id for ids in histories for id in ids if id is not None))
        rows, known = self._item_rows(pa.array(distinct, self._id_type))
        keys = [*distinct, None]
        return dict(zip(keys, [*rows.tolist(), -1], strict=True)), dict(
            zip(keys, [*known.tolist(), False], strict=True)
        )

    @cached_property
    def _item_rows(self) -> ItemRows:
        tower = self._tower()
        assert tower.mapping is not None and tower.model.reads.seen is not None
        return ItemRows(tower.mapping, tower.model.reads.seen)

    def _check_ids(self, lists: Sequence[Sequence[Any]], name: str) -> None:
        """
        Raises:
            ValueError: An id is a text where ids are integers, or the other way round; it would be unknown.
        """
        text = is_text(self._id_type)
        if not text and not pa.types.is_integer(self._id_type):
            return
        for number, ids in enumerate(lists):
            for id in ids:
                if id is not None and isinstance(id, str | bytes) != text:
                    kind = "texts" if text else "integers"
                    raise ValueError(f"query {number}: {name} has the id {id!r}; ids of this index are {kind}")

    def queries_of(self, rows: Tabular) -> torch.Tensor:
        """Query vectors `[Q, D]` of rows with the columns that training read.

        Raises:
            ValueError: The index was not written from a run, or a row cannot be mapped; names column, row and fix.
        """
        mapping = self._tower().mapping
        if mapping is None:
            raise ValueError(f"{self.folder} was not written from a run: send histories or vectors")
        batch, errors = mapping.to_batch_and_errors(rows)
        if errors:
            raise ValueError(f"query {min(errors)}: {errors[min(errors)]}")
        return self._tower().queries(batch)

    @property
    def seen_column(self) -> str | None:
        """The column with the history of a row; None if the tower does not read one."""
        if self.tower is None or self.tower.mapping is None or self.tower.model.reads.seen is None:
            return None
        columns = {feature.name: feature.column for feature in self.tower.mapping.schema.sparse}
        return columns[self.tower.model.reads.seen]

    @cached_property
    def _id_type(self) -> pa.DataType:
        """The type of ids; integers are wide enough for ids that the index does not have."""
        kind = self.items.column(0).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not pa.types.is_integer(kind):
            return kind
        return pa.int64() if pa.types.is_signed_integer(kind) else pa.uint64()

    def _tower(self) -> Tower:
        if self.tower is None:
            raise ValueError(f"{self.folder} has no query tower: send vectors, or write the index from a model")
        return self.tower

    def extended(self, folder: Path, vectors: torch.Tensor, items: pa.Table) -> IndexReport:
        """Writes an index with these items appended, and the same tower and search.

        An approximate index is tuned again, with the same queries and the recall that was asked for at first.

        Raises:
            ExportError: An item exists already, or width or columns differ.
        """
        if vectors.shape[1] != self.report.dim or items.column_names != self.items.column_names:
            raise ExportError(
                f"{self.folder} has vectors of {self.report.dim} numbers and columns {self.items.column_names}; the "
                f"new items have {vectors.shape[1]} and {items.column_names}"
            )
        all_items = pa.concat_tables([self.items, items.cast(self.items.schema)])
        report = self.report
        # Indexes of earlier releases have only the measured recall, which rises with each extension.
        recall = report.target_recall or min(report.recall or 1.0, Search().recall)
        search = Search(kind=report.search, recall=recall, k=report.k or 1)
        path = self.folder / TUNING
        queries = TuningQueries.read(path) if path.exists() else None
        all_vectors = torch.cat([self.vectors, vectors])
        return write_index(
            folder,
            all_vectors,
            all_items,
            search=search,
            tower=self.tower,
            queries=queries,
            apart=report.apart,
            overlap=report.overlap,
        )

    def search(
        self,
        queries_QD: torch.Tensor,
        k: int,
        exclude: Sequence[Sequence[Any]] | None = None,
        where: Mapping[str, Sequence[Any]] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The k items with the largest dot products: (scores `[Q, k]`, rows `[Q, k]`), padded with -inf and -1.

        A query of zeros, as of an empty history, scores all items alike, and gets none.

        Args:
            exclude: Ids to exclude, for each query.
            where: attribute → allowed values; makes the search exact.

        Raises:
            ValueError: An attribute does not exist, queries have the wrong width, or an id has the wrong type.
        """
        if queries_QD.dim() != 2 or queries_QD.shape[1] != self.report.dim:
            raise ValueError(f"queries have shape {list(queries_QD.shape)}; the index needs [Q, {self.report.dim}]")
        self._check_ids(exclude or (), "`exclude`")
        rows = [self.rows_of(ids) for ids in exclude or ()]
        excluded = None
        if any(rows):
            offsets = torch.tensor([0, *map(len, rows)]).cumsum(0)
            excluded = Jagged(torch.tensor([row for query_rows in rows for row in query_rows]), offsets)
        allowed = self._allowed(tuple((name, tuple(values)) for name, values in where.items())) if where else None
        k = min(k, self.report.items)
        if self._approximate is None or allowed is not None:
            scores, found = top_k(queries_QD, self.vectors, k, excluded, allowed)
        else:
            scores, found = self._approximate.search(queries_QD, k, excluded)
        is_zero = ~queries_QD.any(1)[:, None]
        return scores.masked_fill(is_zero, NO_SCORE), found.masked_fill(is_zero, -1)

    def _rows_allowed(self, where: tuple[tuple[str, tuple[Any, ...]], ...]) -> torch.Tensor:
        allowed = np.ones(self.report.items, dtype=bool)
        for name, values in where:
            if name not in self.items.column_names:
                raise ValueError(f"unknown attribute {name!r} in the filter; the index has {self.items.column_names}")
            column = self.items.column(name)
            try:
                value_set = pa.array(values, type=column.type)
            except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
                raise ValueError(f"filter {name!r}: {error}") from None
            allowed &= pc.is_in(column, value_set).to_numpy(zero_copy_only=False)
        return torch.from_numpy(allowed)

    def ids_of(self, rows: torch.Tensor) -> list[list[Any]]:
        """The ids of rows `[Q, k]`, without the padding."""
        found = rows >= 0
        ids = iter(self.items.column(0).take(pa.array(rows[found].numpy())).to_pylist())
        return [[*islice(ids, count)] for count in found.sum(1).tolist()]


def read_report(folder: Path) -> IndexReport:
    """
    Raises:
        ExportError: The index is missing or incomplete.
    """
    try:
        raw = json.loads((folder / INDEX_JSON).read_text(encoding="utf-8"))
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in raw.pop("files").items()}
        tuned = tuple((int(k), int(effort), float(recall)) for k, effort, recall in raw.pop("tuned", ()))
        return IndexReport(files=files, tuned=tuned, **raw)
    except FileNotFoundError:
        raise ExportError(
            f"{folder} is not a complete index: {INDEX_JSON} is missing; write one with `rayrec index`"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ExportError(
            f"{folder / INDEX_JSON} is not the report of an index ({error}): write the index again"
        ) from None
