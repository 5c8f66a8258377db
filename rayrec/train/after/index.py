"""Builds an index from a run of a built-in retriever: item vectors and query tower of a checkpoint."""

from __future__ import annotations

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
from rayrec.inference.tower import Tower, TowerSpec, difference, item_rows
from rayrec.metrics.ranking import Jagged
from rayrec.models import RETRIEVERS
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

LIMITS = {"fp32": 1e-5, "fp16": 1e-2, "int8": 0.1, "int4": 1.0}


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
        ValueError: not a run of a built-in retriever, no item that the model knows, or queries outside their limits.
    """
    folder, selected = find_checkpoint(Path(source).absolute(), checkpoint)
    config = parse_config(config_of_run(folder, allow_code=False))
    if config.model.name not in RETRIEVERS:
        raise TrainError(f"{folder.path} trained {config.model.name}, which scores rows; use `rayrec export`")
    if tables not in LIMITS:
        raise TrainError(f"tables: got {tables!r}; allowed: {', '.join(LIMITS)}")
    tower = _tower(config, CheckpointWeights(selected.path))
    table, rows, left_out = _items(config, tower, items, id_column)
    vectors = tower.vectors(rows)
    queries = None if search is None or search.kind == "exact" else _queries(folder, selected, tower, rows)
    drawn = tower.examples()
    trained = tower.queries(drawn)
    if tables != "fp32":
        tower = tower.in_format(tables)
    apart = difference(tower.queries(drawn), trained)
    if not apart <= LIMITS[tables]:
        raise TrainError(
            f"queries from {tables} tables differ by {apart:.2g} from the trained ones; choose a wider format"
        )
    return write_index(out, vectors, table, search=search, tower=tower, queries=queries, apart=apart, left_out=left_out)


@torch.no_grad()
def _queries(folder: RunFolder, checkpoint: Checkpoint, tower: Tower, rows: torch.Tensor) -> TuningQueries | None:
    """Queries of a sample of evaluation rows; None if they cannot be read.

    Args:
        rows: `[num_items]`, the table row of each item of the index.
    """
    index_row = torch.full((tower.model.num_items,), -1)
    index_row[rows] = torch.arange(len(rows))
    feature, asked = tower.model.reads.seen, list[tuple[torch.Tensor, torch.Tensor]]()
    try:
        for batch in trained_of(folder, checkpoint).batches(16 * TUNING_QUERIES):
            vectors = tower.queries(batch)
            seen = [index_row[:0]] * len(vectors)
            if feature is not None:
                lists = batch.sparse[feature]
                seen = [*index_row[lists.values().long()].split(lists.lengths().tolist())]
            # The query of an empty history is zero, and has no answer.
            asked += [(vector, items) for vector, items in zip(vectors, seen, strict=True) if bool(vector.any())]
            if len(asked) >= TUNING_QUERIES:
                break
    except (DataError, TrainError) as error:
        notice(f"the index is tuned with item vectors, which are found more easily than those of queries: {error}")
        return None
    if not asked:
        return None
    asked = asked[:TUNING_QUERIES]
    stacked = torch.stack([vector for vector, _ in asked])
    if feature is None:
        return TuningQueries(stacked, source="evaluation rows")
    indexed = [items[items >= 0] for _, items in asked]
    excluded = Jagged(torch.cat(indexed), torch.tensor([0, *map(len, indexed)]).cumsum(0))
    return TuningQueries(stacked, excluded, "evaluation rows without the items that they have seen")


def _tower(config: TrainConfig, weights: CheckpointWeights) -> Tower:
    plain = config.to_dict()
    spec = TowerSpec(
        name=str(config.model.name),
        settings=plain["model"]["args"],
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
    rows, known = item_rows(mapping, feature.name, table.column(column))
    if not bool(known.any()):
        raise TrainError(f"{items}: the model knows no item of column {column!r}; name the ids' column with --id")
    table, rows = table.filter(pa.array(known.numpy())), rows[known]
    columns = [column, *(name for name in table.column_names if name != column)]
    return table.select(columns), rows, int((~known).sum())
