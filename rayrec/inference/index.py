"""The item index of an export: item vectors with ids and attributes, and optionally an approximate index.

| file | |
|---|---|
| `export.json` | its entry `search`: sizes, kind of search and its measured recall |
| `vectors.bin` | float32 `[I, D]`, mapped into memory |
| `items.arrow` | id and attributes of each row, mapped into memory |
| `items.index` | id → row (`data/mapping/id_index.py`), mapped into memory |
| `approximate.faiss`, `tuning.pt` | IVF or HNSW over the same vectors, and the queries that it was tuned with |

The other files of the folder are those of the query tower (`artifact.py`). Both have one version, so that queries and
vectors are always of the same training. An index of given vectors has no query tower. The folder `ranker` may have the
export of a ranker, which scores the items that are found, under the same version.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from rayrec.data import Mapping as RowMapping
from rayrec.data.arrays.arrow_types import decoded, is_text, without_views
from rayrec.data.mapping.id_index import DuplicateHash, IdIndex, hashes_of
from rayrec.inference import artifact
from rayrec.inference.artifact import ExportError, ExportIndex, IndexReport
from rayrec.inference.export_store import ExportStore
from rayrec.inference.graph import Inputs, newest_times
from rayrec.inference.item_rows import ItemRows
from rayrec.inference.model import Model
from rayrec.inference.topk import KINDS, NO_SCORE, Approximate, top_k
from rayrec.metrics.ranking import Jagged

if TYPE_CHECKING:
    from rayrec.data.mapping.arrow_input import Tabular

VECTORS, ITEMS, IDS = "vectors.bin", "items.arrow", "items.index"
APPROXIMATE, TUNING = "approximate.faiss", "tuning.pt"
OWN_FILES = (VECTORS, ITEMS, IDS, APPROXIMATE, TUNING)
TUNING_QUERIES = 256
OF_ITEMS = "vectors of random items"
_BLOCK_ROWS = 1 << 16


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
    folder: str | Path,
    vectors_ID: torch.Tensor,
    items: pa.Table,
    *,
    search: Search | None = None,
    tower: str | Path | None = None,
    queries: torch.Tensor | TuningQueries | None = None,
    left_out: int = 0,
    ranker: str | Path | None = None,
) -> ExportIndex:
    """Writes an export with an index. The folder appears complete, or not at all.

    Args:
        folder: Folder to create; must not exist.
        vectors_ID: A vector for each row of `items`; may be mapped into memory.
        items: Unique ids in the first column, integers or texts; the other columns are attributes.
        search: Default: exact.
        tower: Export of the query tower, whose files become part of the export; None: queries must be vectors.
        queries: `[Q, D]` to tune an approximate index with; None: random items, which are easier.
        left_out: Items that were not indexed.
        ranker: Export of a ranker for the items found, whose files become part of the export. It reads the items' id
            and attributes as the columns of these names.

    Raises:
        ExportError: The folder exists; an id is missing, comes twice or has another type; a vector is not finite;
            the ranker reads none of the items' columns; or faiss is not installed.
    """
    folder, search = Path(folder), search or Search()
    _check(vectors_ID, items)
    if isinstance(queries, torch.Tensor):
        queries = TuningQueries(queries)
    with _new_folder(folder) as unfinished:
        export = _without_tower() if tower is None else _with_tower(Path(tower), unfinished, vectors_ID.shape[1])
        if ranker is not None:
            export = _with_ranker(export, Path(ranker), items.column_names, unfinished)
        with open(unfinished / VECTORS, "wb") as file:
            for block in vectors_ID.detach().split(_BLOCK_ROWS):
                block.float().contiguous().numpy().tofile(file)
        _write_items(unfinished, items)
        vectors = _mapped_vectors(unfinished, vectors_ID.shape)
        measured = {} if search.kind == "exact" else _approximate(unfinished, vectors, search, queries)
        report = IndexReport(
            items=len(vectors), dim=vectors.shape[1], search=search.kind, left_out=left_out, **measured
        )
        return _finished(replace(export, search=report), unfinished)


def with_ranker(index: str | Path, folder: str | Path, ranker: str | Path) -> ExportIndex:
    """Writes an export with the query tower and items of an index, and another ranker, under a new version.

    Args:
        index: An export with an index, or a folder of exports, of which the newest counts; a path or URI.

    Raises:
        ExportError: The folder exists, the index is incomplete, or the ranker reads none of the items' columns.
    """
    store = ExportStore(index)
    opened = store.open(store.newest())  # in the cache while this object lives
    source, export = opened.folder, artifact.read_index(opened.folder)
    export.item_index(source)
    files = {name: entry for name, entry in export.files.items() if not name.startswith(f"{artifact.RANKER}/")}
    artifact.check_listed(source, files, checksums=False)
    with pa.memory_map(str(source / ITEMS)) as mapped:
        columns = pa.ipc.open_file(mapped).schema.names
    with _new_folder(Path(folder)) as unfinished:
        artifact.copy_files(source, files, unfinished)
        export = _with_ranker(replace(export, files=files), Path(ranker), columns, unfinished)
        return _finished(export, unfinished)


@contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A hidden folder to fill, which becomes `folder` in the end.

    Raises:
        ExportError: `folder` exists.
    """
    if folder.exists():
        raise ExportError(f"{folder} already exists; choose another name, so that a service can replace its index")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with artifact.scratch_folder(folder) as scratch:
        unfinished = scratch / "export"
        unfinished.mkdir()
        yield unfinished
        unfinished.rename(folder)


def _finished(export: ExportIndex, folder: Path) -> ExportIndex:
    """Writes `export.json` with a new version and the folder's files.

    Args:
        export: Its `files` are those whose checksums are known.
    """
    known = {name: crc for name, (_, crc) in export.files.items()}
    files = artifact.listed_files(folder, known)
    written = replace(export, version=artifact.new_version(), files=files)
    artifact.write_json(folder / artifact.INDEX, written.to_dict())
    return written


def _without_tower() -> ExportIndex:
    """The index of an export without a model."""
    return ExportIndex(
        inputs=Inputs(keys=(), num_dense=0, labels=None, weighted=False),
        rows_of={},
        table_of={},
        places=[],
        logit_shift=0.0,
        dense="fp32",
        targets=[],
        version="",
        versions=artifact.versions_here(),
        origin={},
        files={},
    )


def _with_tower(source: Path, folder: Path, dim: int) -> ExportIndex:
    """Copies the files of a query tower into a folder; returns its index without those of an item index.

    Raises:
        ExportError: The export is not a query tower, or its queries have another width.
    """
    export = artifact.read_index(source)
    if export.inputs.query is None or export.inputs.query.dim != dim:
        width = "" if export.inputs.query is None else f" with queries of {export.inputs.query.dim} numbers"
        raise ExportError(f"{source} is {export.kind}{width}; an index of vectors of {dim} needs their query tower")
    other = (*OWN_FILES, artifact.RANKER)
    files = {name: entry for name, entry in export.files.items() if name.split("/")[0] not in other}
    artifact.check_listed(source, files, checksums=False)
    artifact.copy_files(source, files, folder)
    return replace(export, files=files, ranker=None)


def _with_ranker(export: ExportIndex, source: Path, columns: Sequence[str], folder: Path) -> ExportIndex:
    """Copies the files of a ranker's export below a folder; returns the index with them.

    Args:
        columns: Columns of the items.

    Raises:
        ExportError: The export is no ranker, or reads none of the columns.
    """
    ranker = artifact.read_index(source)
    if not ranker.targets or ranker.inputs.query is not None:
        raise ExportError(f"{source} is {ranker.kind}, which does not score rows; give the export of a ranker")
    artifact.check_listed(source, ranker.files, checksums=False)
    reads = RowMapping.from_config(artifact.read_mapping(source), labels=False).schema.feature_columns
    if not set(reads) & set(columns):
        raise ExportError(
            f"the ranker {source} reads {reads}, but the items have {list(columns)}: index the items with the columns "
            "that the ranker reads of them"
        )
    artifact.copy_files(source, [artifact.INDEX, *ranker.files], folder / artifact.RANKER)
    files = {f"{artifact.RANKER}/{name}": entry for name, entry in ranker.files.items()}
    return replace(export, files={**export.files, **files}, ranker=ranker.version)


def _write_items(folder: Path, items: pa.Table) -> None:
    """
    Raises:
        ExportError: An id comes twice.
    """
    with pa.ipc.new_file(str(folder / ITEMS), items.schema) as writer:
        writer.write_table(items.combine_chunks())
    ids = items.column(0)
    try:
        IdIndex.make(map(hashes_of, _plain_ids(ids)), len(items), is_text(ids.type), folder / IDS)
    except DuplicateHash as error:
        twice = ids[error.positions[1]].as_py()
        raise ExportError(
            f"column {items.column_names[0]!r}: the id {twice!r} comes twice; ids must be unique"
        ) from None


def _plain_ids(ids: pa.ChunkedArray) -> Iterator[Any]:
    """Ids in the form that `IdIndex` reads: int64 arrays, or Arrow arrays of strings."""
    for chunk in ids.chunks:
        plain = decoded(chunk.cast(without_views(chunk.type)))
        yield plain if is_text(plain.type) else plain.cast(pa.int64(), safe=False).to_numpy(zero_copy_only=False)


def _mapped_vectors(folder: Path, shape: Sequence[int]) -> torch.Tensor:
    mapped = np.memmap(folder / VECTORS, dtype=np.float32, mode="c", shape=tuple(shape))
    return torch.from_numpy(mapped)


def _check(vectors: torch.Tensor, items: pa.Table) -> None:
    ids = items.column(0)
    kind = ids.type.value_type if pa.types.is_dictionary(ids.type) else ids.type
    if not is_text(kind) and not pa.types.is_integer(kind):
        raise ExportError(f"column {items.column_names[0]!r} has type {ids.type}; ids must be integers or texts")
    if vectors.dim() != 2 or len(vectors) != len(items) or not len(vectors):
        raise ExportError(f"vectors have shape {list(vectors.shape)}, but there are {len(items):,} items")
    if ids.null_count:
        raise ExportError(f"column {items.column_names[0]!r}: an id is missing; every item needs one")
    for number, block in enumerate(vectors.split(_BLOCK_ROWS)):
        bad = (~block.isfinite()).any(1).nonzero()
        if len(bad):
            row = number * _BLOCK_ROWS + int(bad[0])
            raise ExportError(f"item {ids[row].as_py()!r}: its vector is not finite; check the training")


def _approximate(folder: Path, vectors: torch.Tensor, search: Search, queries: TuningQueries | None) -> dict[str, Any]:
    if queries is None:
        order = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))
        queries = TuningQueries(vectors[order[:TUNING_QUERIES]], source=OF_ITEMS)
    else:
        queries.write(folder / TUNING)
    index = Approximate.build(search.kind, vectors)
    tuned, speedups = [], []
    # Effort does not grow evenly between k and the largest k.
    counts = [search.k * 2**power for power in range(10) if search.k * 2**power < search.max_k]
    for k in sorted({min(count, len(vectors)) for count in (search.k, *counts, max(search.k, search.max_k))}):
        begin = time.perf_counter()
        _, exact = top_k(queries.vectors, vectors, k, queries.seen)
        exact_s = time.perf_counter() - begin
        recall, seconds = index.tune(queries.vectors, exact, search.recall, queries.seen)
        tuned.append((k, index.effort(k), round(recall, 5)))
        speedups.append(round(exact_s / max(seconds, 1e-9), 2))
    index.write(folder / APPROXIMATE)
    (k, effort, recall), speedup = tuned[0], speedups[0]
    measured = {"k": k, "effort": effort, "recall": recall, "speedup": speedup, "tuned": tuple(tuned)}
    return {**measured, "target_recall": search.recall, "tuned_on": queries.source}


class ItemIndex:
    """The index of an export, loaded for search with its query tower. Thread-safe.

    Args:
        folder: An export with an index.
        checksums: Compares the checksums of all files; False compares their sizes only.

    Raises:
        ExportError: The export has no index, is incomplete or damaged, or needs faiss, which is not installed.
    """

    def __init__(self, folder: str | Path, checksums: bool = True) -> None:
        self.folder = Path(folder)
        self.export = artifact.read_index(self.folder)
        artifact.check_listed(self.folder, self.export.files, checksums)
        self.report: IndexReport = self.export.item_index(self.folder)
        self.vectors = _mapped_vectors(self.folder, (self.report.items, self.report.dim))
        self._items_map = pa.memory_map(str(self.folder / ITEMS))
        self.items: pa.Table = pa.ipc.open_file(self._items_map).read_all()
        self._ids = IdIndex.open(self.folder / IDS)
        self.model: Model | None = None
        self.mapping: RowMapping | None = None
        if self.export.targets:
            self.model = Model(self.folder, checksums=False)
            self.mapping = RowMapping.from_config(self.model.mapping_config(), labels=False)
        self._approximate = None
        if self.report.search != "exact":
            efforts = [(k, effort) for k, effort, _ in self.report.tuned]
            self._approximate = Approximate.read(self.report.search, self.folder / APPROXIMATE, efforts)
        self._allowed = lru_cache(maxsize=64)(self._rows_allowed)

    @property
    def version(self) -> str:
        """The version of the export."""
        return self.export.version

    def rows_of(self, ids: Sequence[Any]) -> list[int]:
        """The rows of ids; ids that the index does not have are skipped."""
        rows = self._find(ids)
        return rows[rows >= 0].tolist()

    def _find(self, ids: Sequence[Any]) -> Any:
        """int64 `[n]`, the row of each id; -1 for ids that the index does not have."""
        kinds = set(map(type, ids))
        if kinds == {str if self._ids.text else int}:  # the usual case, in a fifth of the time
            with suppress(OverflowError):
                found: Any = self._ids.find(pa.array(ids, pa.string()) if self._ids.text else np.array(ids, np.int64))
                return found
        if self._ids.text:
            is_id = np.array([isinstance(id, str) for id in ids], bool)
            found = self._ids.find(pa.array([id for id in ids if isinstance(id, str)], pa.string()))
        else:
            is_id = np.array([isinstance(id, int) and -(1 << 63) <= id < 1 << 63 for id in ids], bool)
            found = self._ids.find(np.array([id for id, good in zip(ids, is_id, strict=True) if good], np.int64))
        rows = np.full(len(ids), -1)
        rows[is_id] = found
        return rows

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
        _, mapping = self._tower()
        columns = mapping.schema.feature_columns
        if columns != [self.seen_column]:
            raise ValueError(f"the model reads {columns}, not only a history: send rows with these columns")
        rows, known = self._mapped(histories)
        mapped = [[id for id in ids if rows[id] >= 0] for ids in histories]
        queries = self.queries_of(pa.table({columns[0]: pa.array(mapped, pa.list_(self._id_type))}))
        return queries, [sum(known[id] for id in ids) for ids in histories]

    def known(self, histories: Sequence[Sequence[Any]]) -> list[int]:
        """How many ids of each history the model knows; ids outside of its vocabulary are unknown."""
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
        _, mapping = self._tower()
        query = self.export.inputs.query
        assert query is not None and query.seen is not None
        return ItemRows(mapping, query.seen)

    def _check_ids(self, lists: Sequence[Sequence[Any]], name: str) -> None:
        """
        Raises:
            ValueError: An id is a text where ids are integers, or the other way round; it would be unknown.
        """
        text = is_text(self._id_type)
        if not text and not pa.types.is_integer(self._id_type):
            return
        usual = {type(None), str if text else int}
        for number, ids in enumerate(lists):
            if usual.issuperset(map(type, ids)):
                continue
            for id in ids:
                if id is not None and isinstance(id, str | bytes) != text:
                    kind = "texts" if text else "integers"
                    raise ValueError(f"query {number}: {name} has the id {id!r}; ids of this index are {kind}")

    def queries_of(self, rows: Tabular, times: Sequence[int | None] = ()) -> torch.Tensor:
        """Query vectors `[Q, D]` of rows with the columns that the query tower reads.

        Args:
            times: For models with times, when each row asks, in seconds since 1970; None: at the time of its newest
                item. Empty: all None.

        Raises:
            ValueError: The index has no query tower, it reads no times, or a row cannot be mapped; names column, row
                and fix.
        """
        model, mapping = self._tower()
        batch, errors = mapping.to_batch_and_errors(rows)
        if errors:
            raise ValueError(f"query {min(errors)}: {errors[min(errors)]}")
        if any(time is not None for time in times):
            if not model.index.inputs.lists:
                raise ValueError("the model reads no times: leave out `time`")
            asked = newest_times(batch, model.index.inputs)
            for row, time in enumerate(times):
                asked[row] = asked[row] if time is None else time
            batch = replace(batch, time=asked)
        return model.score(batch)

    @property
    def seen_column(self) -> str | None:
        """The column with the history of a row; None if the tower does not read one."""
        query = self.export.inputs.query
        if self.mapping is None or query is None or query.seen is None:
            return None
        columns = {feature.name: feature.column for feature in self.mapping.schema.sparse}
        return columns[query.seen]

    @cached_property
    def _id_type(self) -> pa.DataType:
        """The type of ids; integers are wide enough for ids that the index does not have."""
        kind = self.items.column(0).type
        kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        if not pa.types.is_integer(kind):
            return kind
        return pa.int64() if pa.types.is_signed_integer(kind) else pa.uint64()

    def _tower(self) -> tuple[Model, RowMapping]:
        if self.model is None or self.mapping is None:
            raise ValueError(f"{self.folder} has no query tower: send vectors, or write the index from a run")
        return self.model, self.mapping

    def extended(
        self, folder: Path, vectors: torch.Tensor, items: pa.Table, ranker: str | Path | None = None
    ) -> ExportIndex:
        """Writes an export with these items appended, and the same query tower and search, under a new version.

        An approximate index is tuned again, with the same queries and the recall that was asked for at first.

        Args:
            ranker: As in `write_index`; None: that of this index, if it has one.

        Raises:
            ExportError: An item exists already, or width or columns differ.
        """
        if vectors.shape[1] != self.report.dim or items.column_names != self.items.column_names:
            raise ExportError(
                f"{self.folder} has vectors of {self.report.dim} numbers and columns {self.items.column_names}; the "
                f"new items have {vectors.shape[1]} and {items.column_names}"
            )
        report, path = self.report, self.folder / TUNING
        recall = report.target_recall or Search().recall
        folder.parent.mkdir(parents=True, exist_ok=True)
        with artifact.scratch_folder(folder) as scratch:
            # In a file, which the system may write out: the vectors may not fit into memory.
            shape = (report.items + len(vectors), report.dim)
            joined = torch.from_numpy(np.memmap(scratch / "vectors", dtype=np.float32, mode="w+", shape=shape))
            for start in range(0, report.items, _BLOCK_ROWS):
                stop = min(start + _BLOCK_ROWS, report.items)
                joined[start:stop] = self.vectors[start:stop]
            joined[report.items :] = vectors
            return write_index(
                folder,
                joined,
                pa.concat_tables([self.items, items.cast(self.items.schema)]),
                search=Search(kind=report.search, recall=recall, k=report.k or 1),
                tower=None if self.model is None else self.folder,
                queries=TuningQueries.read(path) if path.exists() else None,
                ranker=ranker or (None if self.export.ranker is None else self.folder / artifact.RANKER),
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
            where: attribute → allowed values. The search is exact for few allowed items, and for queries with few of
                them among the nearest.

        Raises:
            ValueError: An attribute does not exist, queries have the wrong width, or an id has the wrong type.
        """
        if queries_QD.dim() != 2 or queries_QD.shape[1] != self.report.dim:
            raise ValueError(f"queries have shape {list(queries_QD.shape)}; the index needs [Q, {self.report.dim}]")
        self._check_ids(exclude or (), "`exclude`")
        excluded = self._excluded(exclude or ())
        allowed = self._allowed(tuple((name, tuple(values)) for name, values in where.items())) if where else None
        k = min(k, self.report.items)
        if self._approximate is None:
            scores, found = top_k(queries_QD, self.vectors, k, excluded, allowed)
        elif allowed is None:
            scores, found = self._approximate.search(queries_QD, k, excluded)
        else:
            scores, found = self._search_allowed(self._approximate, queries_QD, k, excluded, allowed)
        is_zero = ~queries_QD.any(1)[:, None]
        return scores.masked_fill(is_zero, NO_SCORE), found.masked_fill(is_zero, -1)

    def _search_allowed(
        self,
        approximate: Approximate,
        queries_QD: torch.Tensor,
        k: int,
        excluded: Jagged | None,
        allowed: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """An approximate search, and an exact one of the queries that it finds too few items for."""
        found = approximate.search_allowed(queries_QD, k, excluded, allowed)
        if found is None:
            return top_k(queries_QD, self.vectors, k, excluded, allowed)
        scores, rows, is_complete = found
        if not bool(is_complete.all()):
            again = ~is_complete
            excluded = None if excluded is None else excluded.selected(again)
            scores[again], rows[again] = top_k(queries_QD[again], self.vectors, k, excluded, allowed)
        return scores, rows

    def _excluded(self, exclude: Sequence[Sequence[Any]]) -> Jagged | None:
        """Rows of the ids of each query; None without any."""
        rows = self._find([id for ids in exclude for id in ids])
        if not len(rows):
            return None
        found = rows >= 0
        ends = np.cumsum([0, *found])[np.cumsum([0, *map(len, exclude)])] if len(exclude) > 1 else [0, found.sum()]
        return Jagged(torch.from_numpy(rows[found]), torch.as_tensor(ends)) if ends[-1] else None

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
