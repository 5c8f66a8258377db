"""Rows that are written into sharded tables, against the unsharded module with the same rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist

from rayrec.data import SparseFeature
from rayrec.data.source.initial_vectors import InitialVectors
from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    ModuleSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.storage import Patience
from rayrec.train.setup.init_vectors import TableVectors, load_vectors
from tests.device import DEVICE
from tests.distributed.oracle import SGD, cut, draw_kjt
from tests.ranks import on_ranks

T = ShardingType
SHAPES = {
    "tw": (20, 8),
    "rw": (31, 8),
    "cw": (24, 20),
    "twrw": (30, 8),
    "dp": (9, 8),
    "dense": (12, 4),
    "untouched": (6, 4),
}


def tables_of(data_type: DataType) -> dict[str, EmbeddingBagConfig]:
    return {
        name: EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"], data_type=data_type
        )
        for name, (rows, dim) in SHAPES.items()
    }


def plan_of(tables: dict[str, EmbeddingBagConfig]) -> ModuleSharding:
    return {
        "tw": cut(tables["tw"], T.TABLE_WISE, [1]),
        "rw": cut(tables["rw"], T.ROW_WISE, [0, 1]),
        "cw": cut(tables["cw"], T.COLUMN_WISE, [0, 1, 0]),  # two rectangles of unequal width on rank 0
        "twrw": cut(tables["twrw"], T.TABLE_ROW_WISE, [0, 1]),
        "dp": cut(tables["dp"], T.DATA_PARALLEL, [0, 1]),
        "dense": cut(tables["dense"], T.ROW_WISE, [1, 0], kernel="dense"),
        "untouched": cut(tables["untouched"], T.ROW_WISE, [0, 1]),
    }


def numbers_of(name: str) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Two thirds of the rows of a table in a drawn order, and their vectors."""
    rows, dim = SHAPES[name]
    random = np.random.default_rng(len(name) + rows)
    return random.permutation(rows)[: 2 * rows // 3], random.normal(size=(2 * rows // 3, dim)).astype(np.float32)


def files_in(folder: Path) -> tuple[TableVectors, ...]:
    """Vectors of all tables but one, in files of several row groups."""
    out = []
    for name, (rows, dim) in SHAPES.items():
        if name == "untouched":
            continue
        ids, numbers = numbers_of(name)
        vectors = pa.FixedSizeListArray.from_arrays(pa.array(numbers.ravel()), dim)
        pq.write_table(pa.table({"id": ids, "v": vectors}), folder / f"{name}.parquet", row_group_size=5)
        files = InitialVectors(
            table=name,
            path=str(folder / f"{name}.parquet"),
            id="id",
            vector="v",
            feature=SparseFeature(name="f"),
            num_rows=rows,
            dim=dim,
            largest=1e9,
            patience=Patience(),
        )
        out.append(TableVectors(table=name, files=files.with_files(), text=""))
    return tuple(out)


def load_and_look_up(group: dist.ProcessGroup, vectors: tuple[TableVectors, ...], data_type: DataType) -> Any:
    tables = tables_of(data_type)
    model = DistributedModelParallel(
        EmbeddingBagCollection([*tables.values()], seed=3),
        env=ShardingEnv.from_process_group(group),
        device=DEVICE,
        plan=ShardingPlan({"": plan_of(tables)}),
        sharders=[EmbeddingBagCollectionSharder(SGD)],
    )
    load_vectors(vectors, model, group)
    kjt = draw_kjt(torch.Generator().manual_seed(group.rank()), [*tables.values()], 16, 4).to(DEVICE)
    bags = model(kjt).wait().values().cpu()
    shards = [
        (table.config.name, item.shard.rows, item.shard.cols, item.weight.float().cpu())
        for table in model.tables().values()
        for item in table.local
    ]
    return bags, shards


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16], ids=lambda kind: kind.name)
def test_every_plan_has_the_rows_of_the_files_as_the_unsharded_module(tmp_path: Path, data_type: DataType) -> None:
    tables = tables_of(data_type)
    expected = EmbeddingBagCollection([*tables.values()], seed=3)
    weights = {name: expected.embedding_bags[name].weight.detach() for name in tables}
    for name in tables:
        if name != "untouched":
            rows, numbers = numbers_of(name)
            weights[name][torch.from_numpy(rows)] = torch.from_numpy(numbers).to(weights[name])
    answers = on_ranks(2, load_and_look_up, files_in(tmp_path), data_type)
    names = set()
    for rank, (bags, shards) in enumerate(answers):
        for name, rows, cols, weight in shards:
            names.add(name)
            whole = weights[name][rows.start : rows.stop, cols.start : cols.stop].float()
            torch.testing.assert_close(weight, whole, atol=0, rtol=0, msg=lambda text, name=name: f"{name}: {text}")
        kjt = draw_kjt(torch.Generator().manual_seed(rank), [*tables.values()], 16, 4)
        torch.testing.assert_close(bags.float(), expected(kjt).values().detach().float(), atol=2e-3, rtol=2e-3)
    assert names == {*SHAPES}
