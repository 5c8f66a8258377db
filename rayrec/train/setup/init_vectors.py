"""Initial rows of tables from vectors in files (`tables[].init`): finds and checks the files, and loads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rayrec.checkpoint.manifest import differing
from rayrec.checkpoint.polling import on_every_rank
from rayrec.data.arrays.buffers import F32, I64
from rayrec.data.mapping.schema import SparseFeature
from rayrec.data.source.initial_vectors import InitialVectors
from rayrec.distributed import DistributedModelParallel
from rayrec.distributed.comm import Group, all_gather_object, broadcast_object
from rayrec.models.config import TableConfig
from rayrec.modules import DataType
from rayrec.storage.retries import Patience
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.setup import build

Fingerprint = Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableVectors:
    """Files with initial rows of a table, and the line that reports which rows start from them."""

    table: str
    files: InitialVectors
    text: str


def initial_vectors(config: TrainConfig, mapping: Mapping[str, Fingerprint]) -> tuple[TableVectors, ...]:
    """The initial vectors of all tables that have some. Reads the ids of the files, but no vectors.

    Args:
        mapping: fingerprint of the id mapping, by feature.

    Raises:
        TrainError: features of a table map ids differently, and none of them is named.
        DataError: the files cannot be read, their columns do not fit the table, or an id is null or repeated.
    """
    rows_of, out = build.rows_of(config), []
    for table in config.tables:
        if table.vectors is None:
            continue
        feature = _feature_of(table, config, mapping)
        files = InitialVectors(
            table=table.name,
            path=table.vectors.path,
            id=table.vectors.id,
            vector=table.vectors.vector,
            feature=feature,
            num_rows=rows_of[feature.name],
            dim=table.dim,
            largest=torch.finfo(DataType[table.data_type.upper()].dtype).max,
            patience=Patience(config.data.read.retries, config.data.read.patience_s),
        ).with_files()
        out.append(TableVectors(table=table.name, files=files, text=files.text(files.count_rows(), table.rows)))
    return tuple(out)


def load_vectors(vectors: tuple[TableVectors, ...], model: DistributedModelParallel, host: Group) -> None:
    """Writes the vectors into the shards of this rank. On each host, one rank reads the files, in batches, for all
    ranks of the host; a file of a table without a shard on the host is not read.

    Args:
        host: a CPU (gloo) group of the ranks of this host, which no other thread uses; None for one rank.

    Raises:
        DataError: a vector that does not fit the table; names file, row and column.
        DataUnavailable: the storage did not respond.
    """
    by_name = {item.table: item.files for item in vectors}
    for name, table in model.tables().items():
        files = by_name.get(name.rpartition(".")[2])
        if files is None or not any(all_gather_object(bool(table.local), host)):
            continue
        for rows, numbers in _read_by_one(files, host):
            if table.local:
                table.set_rows(torch.from_numpy(rows), torch.from_numpy(numbers))


def _read_by_one(files: InitialVectors, host: Group) -> Iterator[tuple[I64, F32]]:
    """On every rank of a host, the batches of the files, which its first rank reads."""
    batches: Iterator[tuple[I64, F32] | None] = iter(files.batches() if host is None or host.rank() == 0 else ())
    while (batch := broadcast_object(on_every_rank(lambda: next(batches, None), host), host)) is not None:
        yield batch


def _feature_of(table: TableConfig, config: TrainConfig, mapping: Mapping[str, Fingerprint]) -> SparseFeature:
    """The feature whose mapping gives the rows of the ids in the files.

    Raises:
        TrainError: features of the table map ids differently, and none of them is named.
    """
    assert table.vectors is not None
    features = {feature.name: feature for feature in config.data_schema.sparse}
    if table.vectors.feature is not None:
        return features[table.vectors.feature]
    first, *others = table.features
    for other in others:
        for name in differing(mapping[first], mapping[other]):
            # Where a column comes from does not change the row of a value in it.
            if name != "derived":
                raise TrainError(
                    f"tables.{table.name}.init: features {first!r} and {other!r} map ids differently ({name}: "
                    f"{mapping[first].get(name)}, {mapping[other].get(name)}); set tables.{table.name}.init.feature to "
                    "the one whose ids the files have"
                )
    return features[first]
