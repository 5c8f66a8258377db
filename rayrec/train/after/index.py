"""Builds an index from a run of a built-in retriever: item vectors and query tower of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import torch

from rayrec.checkpoint import Checkpoint
from rayrec.checkpoint.reader import CheckpointWeights
from rayrec.data import DataError, Mapping
from rayrec.data.arrays.widening import concatenated
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.mapping.rules import Identity
from rayrec.inference.graph import collections_in, configs_of, table_path
from rayrec.inference.index import TUNING_QUERIES, IndexReport, Search, TuningQueries, write_index
from rayrec.inference.topk import recall_of, top_k
from rayrec.inference.tower import ItemRows, Tower, TowerSpec, difference
from rayrec.metrics.ranking import Jagged
from rayrec.models import RETRIEVERS, Batch
from rayrec.storage.parquet import open_parquet
from rayrec.storage.struct_fields import leaf_table
from rayrec.train.after.export import find_checkpoint, trained_of
from rayrec.train.config.file import parse_config
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.run.choice import NEWEST
from rayrec.train.run.config import config_of_run
from rayrec.train.run.folder import RunFolder
from rayrec.train.terminal import notice

OVERLAP_K = 10
# By number format of the tower's tables: the share of the trained model's best items that it must find.
MIN_OVERLAP = {"fp32": 1.0, "fp16": 0.95, "int8": 0.8, "int4": 0.5}


def index_run(
    source: str | Path,
    out: Path,
    items: str | None = None,
    id_column: str = "item",
    *,
    search: Search | None = None,
    tables: str = "fp32",
    checkpoint: str = NEWEST,
) -> IndexReport:
    """Build an index from a checkpoint of a run.

    An approximate index is tuned with queries of the run's evaluation rows, which exclude the items that they have
    seen; or with item vectors if these rows are gone, and stderr says so.

    Args:
        source: a run folder, or a checkpoint inside it.
        out: folder to create; must not exist.
        items: Parquet of the items. Items that the model does not know, because they are outside of its vocabulary or
            its table, are left out and counted in the report: they would all have one vector. None indexes every row of
            the item table; its ids must then be row numbers.
        id_column: id column of `items`; other columns become attributes to filter by.
        tables: number format of the tower's tables; item vectors are float32.

    Raises:
        ValueError: not a run of a built-in retriever, no item that the model knows, or a number format with which
            queries find too few of the trained model's best items.
    """
    folder, selected = find_checkpoint(Path(source).absolute(), checkpoint)
    config = parse_config(config_of_run(folder, allow_code=False))
    if config.model.name not in RETRIEVERS:
        raise TrainError(f"{folder.path} trained {config.model.name}, which scores rows; use `rayrec export`")
    if tables not in MIN_OVERLAP:
        raise TrainError(f"tables: got {tables!r}; allowed: {', '.join(MIN_OVERLAP)}")
    tower = _tower(config, CheckpointWeights(selected.path))
    table, rows, left_out = _items(config, tower, items, id_column)
    vectors = tower.vectors(rows)
    approximate = search is not None and search.kind != "exact"
    asked = _evaluation_rows(folder, selected) if approximate or tables != "fp32" else []
    queries = _queries(tower, asked, rows) if approximate else None
    compared = [tower.examples(), *asked]
    trained = torch.cat([tower.queries(batch) for batch in compared])
    if tables != "fp32":
        tower = tower.in_format(tables)
    stored = torch.cat([tower.queries(batch) for batch in compared])
    apart = difference(stored, trained)
    if not apart < float("inf"):
        raise TrainError(f"{folder.path}: a query is not finite; check the training")
    overlap = _overlap(stored, trained, vectors, skip=compared[0].rows if asked else 0)
    if overlap < MIN_OVERLAP[tables]:
        raise TrainError(
            f"with {tables} tables, {overlap:.0%} of the {OVERLAP_K} best items are those of the trained model, fewer "
            f"than {MIN_OVERLAP[tables]:.0%}; choose a wider format"
        )
    return write_index(
        out,
        vectors,
        table,
        search=search,
        tower=tower,
        queries=queries,
        apart=apart,
        overlap=round(overlap, 5),
        left_out=left_out,
    )


def _evaluation_rows(folder: RunFolder, checkpoint: Checkpoint) -> list[Batch]:
    """Batches of a sample of evaluation rows, at least `TUNING_QUERIES` if there are so many; empty without any."""
    batches, count = [], 0
    try:
        for batch in trained_of(folder, checkpoint).batches(16 * TUNING_QUERIES):
            batches.append(batch)
            count += batch.rows
            if count >= TUNING_QUERIES:
                break
    except (DataError, TrainError) as error:
        notice(f"the index is tuned and compared with random items, which are easier than evaluation rows: {error}")
        return []
    return batches


def _overlap(stored: torch.Tensor, trained: torch.Tensor, vectors: torch.Tensor, skip: int) -> float:
    """Mean share of the trained model's best items that the stored tower finds, without the first `skip` queries."""
    asks = trained.any(1)
    asks[:skip] = False
    stored, trained = stored[asks][:TUNING_QUERIES], trained[asks][:TUNING_QUERIES]
    if stored.equal(trained):
        return 1.0
    k = min(OVERLAP_K, len(vectors))
    return recall_of(top_k(stored, vectors, k)[1], top_k(trained, vectors, k)[1])


def _queries(tower: Tower, batches: Sequence[Batch], rows: torch.Tensor) -> TuningQueries | None:
    """Queries of the batches and the items that they have seen; None without any.

    Args:
        rows: `[num_items]`, the table row of each item of the index.
    """
    # The queries of empty histories are zero, and have no answer.
    vectors = [tower.queries(batch) for batch in batches]
    asks = [batch_vectors.any(1) for batch_vectors in vectors]
    found = [batch_vectors[mask] for batch_vectors, mask in zip(vectors, asks, strict=True)]
    if not any(map(len, found)):
        return None
    queries, feature = torch.cat(found)[:TUNING_QUERIES], tower.model.reads.seen
    if feature is None:
        return TuningQueries(queries, source="evaluation rows")
    index_row = torch.full((tower.model.num_items,), -1)
    index_row[rows] = torch.arange(len(rows))
    lists = []
    for batch, mask in zip(batches, asks, strict=True):
        seen = batch.sparse[feature]
        items = index_row[seen.values().long()].split(seen.lengths().tolist())
        lists += [row[row >= 0] for row, is_query in zip(items, mask.tolist(), strict=True) if is_query]
    lists = lists[: len(queries)]
    excluded = Jagged(torch.cat(lists), torch.tensor([0, *map(len, lists)]).cumsum(0))
    return TuningQueries(queries, excluded, "evaluation rows without the items that they have seen")


def _tower(config: TrainConfig, weights: CheckpointWeights) -> Tower:
    plain = config.to_dict()
    spec = TowerSpec(
        name=str(config.model.name),
        settings=plain["model"]["args"] | {"loss": plain["model"]["loss"]},
        tables={table.name: (table.rows, table.dim, list(table.features)) for table in config.tables},
        num_dense=config.data_schema.num_dense,
    )
    tower = Tower.of(spec, raw={key: plain[key] for key in ("schema", "tables")})
    state = weights.dense()
    for path, collection in collections_in(tower.model).items():
        for table in configs_of(collection):
            key = table_path(path, collection, table.name)
            state[f"{key}.weight"] = weights.read_rows(key, 0, table.num_embeddings).float()
    tower.model.load_state_dict(state)
    return tower


def _items(config: TrainConfig, tower: Tower, items: str | None, column: str) -> tuple[pa.Table, torch.Tensor, int]:
    """The known items with their id column first, the table row of each, `[num_items]`, and the number of others."""
    mapping = Mapping.from_config(config, labels=False)
    feature = next(sparse for sparse in mapping.schema.sparse if sparse.name == tower.model.item)
    if items is None:
        if not isinstance(feature.mapping, Identity):
            raise TrainError(f"ids of {feature.name!r} are not rows of its table: give the items with --items")
        rows = torch.arange(tower.model.num_items)
        return pa.table({column: rows.numpy()}), rows, 0
    uris = [file.uri for file in find_parquet(items)]
    table = concatenated([leaf_table(open_parquet(uri).read()) for uri in uris], uris)
    if column not in table.column_names:
        raise TrainError(f"{items} has no column {column!r}; it has {table.column_names}: name the ids' with --id")
    rows, known = ItemRows(mapping, feature.name)(table.column(column))
    if not bool(known.any()):
        raise TrainError(f"{items}: the model knows no item of column {column!r}; name the ids' column with --id")
    table, rows = table.filter(pa.array(known.numpy())), rows[known]
    columns = [column, *(name for name in table.column_names if name != column)]
    return table.select(columns), rows, int((~known).sum())
