"""Builds an index from a run of a retriever: the export of its query tower, and the vectors of its items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pyarrow as pa
import torch

from rayrec.data import Identity
from rayrec.data import Mapping as RowMapping
from rayrec.data.arrays.arrow_types import decoded
from rayrec.data.arrays.widening import concatenated
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.dynamic_ids import IdMap
from rayrec.inference.artifact import MAPPING, ExportIndex, read_index
from rayrec.inference.checkpoint_model import CheckpointModel, Trained
from rayrec.inference.export import Export, ExportOptions, write_mapping
from rayrec.inference.index import TUNING_QUERIES, Search, TuningQueries, write_index
from rayrec.inference.item_rows import ItemRows
from rayrec.inference.model import Model
from rayrec.inference.parity import Parity
from rayrec.metrics.ranking import Jagged
from rayrec.models import Batch, Retriever
from rayrec.models.item_features import ItemFeatures
from rayrec.storage.locations import local_path
from rayrec.storage.parquet import open_parquet
from rayrec.storage.struct_fields import leaf_table
from rayrec.train.after.export import find_checkpoint, note_export, parsed_config, trained_of, write_export
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.run.choice import NEWEST
from rayrec.train.setup import build
from rayrec.train.setup.item_features import ItemTable


@dataclass(frozen=True, slots=True)
class Indexed:
    """A written export with an index; `parity` is None for the query tower of an earlier export."""

    folder: Path
    index: ExportIndex
    parity: Parity | None


def index_run(
    source: str | Path,
    out: str | Path,
    items: str | None = None,
    id_column: str = "item",
    *,
    search: Search | None = None,
    options: ExportOptions | None = None,
    tower: str | Path | None = None,
    ranker: str | Path | None = None,
    data: str | None = None,
    factory: build.Factory | None = None,
    allow_code: bool = False,
    checkpoint: str = NEWEST,
) -> Indexed:
    """Exports the query tower of a checkpoint with an index of items.

    Tables are read in blocks of rows, so memory does not grow with them. An approximate index is tuned with queries of
    evaluation rows, which exclude the items that they have seen.

    Args:
        source: a run folder, or a checkpoint inside it.
        out: folder to create; must not exist.
        items: Parquet of the items. Items that the model does not know, because they are outside of its vocabulary or
            its table, are left out and counted in the report: they would all have one vector. With item features, they
            are left out only if they have none: the features are columns of this file, or of the tables in the
            config's `data.entities`. None indexes every row of the item table; its ids must then be row numbers.
        id_column: id column of `items`; other columns become attributes to filter by.
        options: of the export of the query tower; item vectors are float32.
        tower: an export of this checkpoint to take the query tower from, instead of exporting it.
        ranker: an export of a ranker for the items found, see `write_index`.
        data, factory, allow_code, checkpoint: see `export_run`.

    Raises:
        ValueError: not a run of a retriever, no item that the model knows, `tower` is of another checkpoint, or an
            error of `rayrec.inference.export`.
    """
    folder, selected = find_checkpoint(Path(source).absolute(), checkpoint)
    given = {"data": data, "factory": factory, "allow_code": allow_code}
    config = parsed_config(folder, **given)  # type: ignore[arg-type]
    trained = trained_of(folder, selected, **given)  # type: ignore[arg-type]
    model = trained.make_model()
    if not isinstance(model, Retriever):
        raise TrainError(f"{folder.path} trained a model that scores rows; use `rayrec export`")
    found = _items(config, trained.ids, model, items, id_column)
    table, rows = found.table, found.rows
    out = local_path(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as scratch:
        parity = None
        if tower is None:
            exported = write_export(trained, Path(scratch) / "tower", options)
            tower, parity = exported.folder, exported.parity
        else:
            _check_tower(Path(tower), trained)
        vectors = _vectors(trained, found, Path(scratch) / "vectors")
        approximate = search is not None and search.kind != "exact"
        queries = _queries(trained, model, Model(tower), rows) if approximate else None
        made = {"search": search, "tower": tower, "queries": queries, "left_out": found.left_out, "ranker": ranker}
        index = write_index(out, vectors, table, **made)  # type: ignore[arg-type]
    if parity is not None:
        note_export(folder, Export(out, index, parity))
    return Indexed(out, index, parity)


def _check_tower(tower: Path, trained: Trained) -> None:
    """
    Raises:
        TrainError: the export is of another checkpoint.
    """
    origin = read_index(tower).origin
    if origin != dict(trained.origin):
        raise TrainError(
            f"{tower} is an export of {origin}, not of {dict(trained.origin)}: its queries would not fit the items; "
            "give an export of this checkpoint, or leave out --tower"
        )


def _vectors(trained: Trained, items: _Items, path: Path) -> torch.Tensor:
    """Vectors `[I, D]` of the items, in a file that is mapped into memory."""
    vectors: torch.Tensor | None = None
    for indices, block in CheckpointModel(trained).item_vectors(items.rows, items.features):
        if vectors is None:
            shape = (len(items.rows), block.shape[1])
            vectors = torch.from_numpy(np.memmap(path, dtype=np.float32, mode="w+", shape=shape))
        vectors[indices] = block.float()
    assert vectors is not None
    return vectors


def _queries(trained: Trained, model: Retriever, tower: Model, rows: torch.Tensor) -> TuningQueries | None:
    """Queries of evaluation rows, and the items that they have seen; None without any.

    Args:
        rows: `[I]`, the table row of each item of the index, or -1.
    """
    vectors, lists, count, feature = list[torch.Tensor](), list[torch.Tensor](), 0, model.reads.seen
    index_row = torch.full((model.num_items,), -1)
    index_row[rows[rows >= 0]] = torch.arange(len(rows))[rows >= 0]
    for batch in trained.batches(16 * TUNING_QUERIES):
        queries = tower.score(batch)
        is_asked = queries.any(1)  # the queries of empty histories are zero, and have no answer
        vectors.append(queries[is_asked])
        if feature is not None:
            lists += _seen(batch, feature, index_row, is_asked.tolist())
        count += len(vectors[-1])
        if count >= TUNING_QUERIES:
            break
    if not count:
        return None
    queries = torch.cat(vectors)[:TUNING_QUERIES]
    if feature is None:
        return TuningQueries(queries, source="evaluation rows")
    lists = lists[: len(queries)]
    excluded = Jagged(torch.cat(lists), torch.tensor([0, *map(len, lists)]).cumsum(0))
    return TuningQueries(queries, excluded, "evaluation rows without the items that they have seen")


def _seen(batch: Batch, feature: str, index_row: torch.Tensor, asked: Sequence[bool]) -> list[torch.Tensor]:
    """The rows of the index that each asked row has seen."""
    seen = batch.sparse[feature]
    items = index_row[seen.values().long()].split(seen.lengths().tolist())
    return [rows[rows >= 0] for rows, is_asked in zip(items, asked, strict=True) if is_asked]


@dataclass(frozen=True, slots=True)
class _Items:
    """The items of an index.

    Args:
        table: Their id column first.
        rows: `[I]`, the table row of each; -1: none, for an item with features.
        left_out: Number of items without a vector.
        features: None: the model knows those of the rows, or has none.
    """

    table: pa.Table
    rows: torch.Tensor
    left_out: int = 0
    features: ItemFeatures | None = None


def _items(config: TrainConfig, ids: Mapping[str, IdMap], model: Retriever, items: str | None, column: str) -> _Items:
    """The items that have a vector.

    Args:
        ids: feature with dynamic ids → their map.
    """
    if not config.data_schema.dynamic:
        mapping = RowMapping.from_config(config, labels=False)
        features = config.model.args["item_features"] if model.has_item_features else ()
        return _known_items(mapping, model, items, column, features)
    with TemporaryDirectory() as folder:
        write_mapping({key: config.to_dict()[key] for key in ("schema", "tables")}, Path(folder), ids)
        mapping = RowMapping.from_config(Path(folder) / MAPPING, labels=False)
        return _known_items(mapping, model, items, column)


def _known_items(
    mapping: RowMapping, model: Retriever, items: str | None, column: str, features: Sequence[str] = ()
) -> _Items:
    feature = next(sparse for sparse in mapping.schema.sparse if sparse.name == model.item)
    if items is None:
        if not isinstance(feature.mapping, Identity):
            raise TrainError(f"ids of {feature.name!r} are not rows of its table: give the items with --items")
        rows = torch.arange(model.num_items)
        return _Items(pa.table({column: rows.numpy()}), rows)
    uris = [file.uri for file in find_parquet(items)]
    table = concatenated([leaf_table(open_parquet(uri).read()) for uri in uris], uris)
    if column not in table.column_names:
        raise TrainError(f"{items} has no column {column!r}; it has {table.column_names}: name the ids' with --id")
    columns = [column, *(name for name in table.column_names if name != column)]
    table = table.select(columns)
    if features:
        return _with_features(mapping, model.item, features, items, table)
    rows, known = ItemRows(mapping, feature.name)(table.column(column))
    if not bool(known.any()):
        raise TrainError(f"{items}: the model knows no item of column {column!r}; name the ids' column with --id")
    return _Items(table.filter(pa.array(known.numpy())), rows[known], int((~known).sum()))


def _with_features(mapping: RowMapping, item: str, features: Sequence[str], path: str, table: pa.Table) -> _Items:
    """The items with their features, which are columns of the table, or else of the tables of the config.

    Args:
        table: Of the files at `path`.
    """
    read = ItemTable(mapping, item, features)
    if set(read.columns) <= set(table.column_names):
        read = ItemTable(mapping, item, features, path, table.column_names[0])
    found = read.of(decoded(table.column(0).combine_chunks()))
    kept = found.has_vector
    if not bool(kept.any()):
        raise TrainError(
            f"{path}: no item of column {table.column_names[0]!r} has the features {', '.join(features)}: give their "
            f"columns ({', '.join(read.columns)}) in the file, or add the items to data.entities of the run"
        )
    own = found.features.taken(kept.nonzero().flatten())
    return _Items(table.filter(pa.array(kept.numpy())), found.rows[kept], int((~kept).sum()), own)
