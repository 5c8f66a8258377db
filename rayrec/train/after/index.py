"""Builds an index from a run of a built-in retriever: item vectors and query tower of a checkpoint."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import torch

from rayrec.checkpoint.reader import CheckpointWeights
from rayrec.data import Mapping
from rayrec.data.arrays.widening import concatenated
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.mapping.rules import Identity
from rayrec.inference.graph import collections_in, configs_of, table_path
from rayrec.inference.index import IndexReport, Search, write_index
from rayrec.inference.tower import Tower, TowerSpec, difference
from rayrec.models import RETRIEVERS
from rayrec.storage.parquet import open_parquet
from rayrec.storage.struct_fields import leaf_table
from rayrec.train.after.export import find_checkpoint
from rayrec.train.config.file import parse_config
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.run.choice import NEWEST
from rayrec.train.run.config import config_of_run

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

    Args:
        source: a run folder, or a checkpoint inside it.
        out: folder to create; must not exist.
        items: Parquet of the items, which may include items that are not in the training data. None indexes every row
            of the item table; its ids must then be row numbers.
        id_column: id column of `items`; other columns become attributes to filter by.
        tables: number format of the tower's tables; item vectors are float32.

    Raises:
        ValueError: not a run of a built-in retriever, items that cannot be mapped, or queries outside their limits.
    """
    folder, selected = find_checkpoint(Path(source).absolute(), checkpoint)
    config = parse_config(config_of_run(folder, allow_code=False))
    if config.model.name not in RETRIEVERS:
        raise TrainError(f"{folder.path} trained {config.model.name}, which scores rows; use `rayrec export`")
    if tables not in LIMITS:
        raise TrainError(f"tables: got {tables!r}; allowed: {', '.join(LIMITS)}")
    tower = _tower(config, CheckpointWeights(selected.path))
    table, rows = _items(config, tower, items, id_column)
    vectors = tower.vectors(rows)
    drawn = tower.examples()
    trained = tower.queries(drawn)
    if tables != "fp32":
        tower = tower.in_format(tables)
    apart = difference(tower.queries(drawn), trained)
    if not apart <= LIMITS[tables]:
        raise TrainError(
            f"queries from {tables} tables differ by {apart:.2g} from the trained ones; choose a wider format"
        )
    return write_index(out, vectors, table, search=search, tower=tower, apart=apart)


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


def _items(config: TrainConfig, tower: Tower, items: str | None, column: str) -> tuple[pa.Table, torch.Tensor]:
    """The items with their id column first, and the table row of each item, `[num_items]`."""
    mapping = Mapping.from_config(config, labels=False)
    feature = next(sparse for sparse in mapping.schema.sparse if sparse.name == tower.model.item)
    if items is None:
        if not isinstance(feature.mapping, Identity):
            raise TrainError(f"ids of {feature.name!r} are not rows of its table: give the items with --items")
        rows = torch.arange(tower.model.num_items)
        return pa.table({column: rows.numpy()}), rows
    uris = [file.uri for file in find_parquet(items)]
    table = concatenated([leaf_table(open_parquet(uri).read()) for uri in uris], uris)
    if column not in table.column_names:
        raise TrainError(f"{items} has no column {column!r}; it has {table.column_names}: name the ids' with --id")
    scalar = feature.model_copy(update={"kind": "id", "column": column, "max_length": None})
    schema = mapping.schema.model_copy(update={"sparse": [scalar], "dense": [], "sequences": []})
    ids = Mapping(schema, mapping.rows_of, labels=False).to_batch(table.select([column])).sparse
    if not bool((ids.lengths() == 1).all()):
        raise TrainError(f"{items}: an item of column {column!r} is in no row of the table; leave it out")
    return table.select([column, *(name for name in table.column_names if name != column)]), ids.values()
