"""All pairs of plans and worlds: saved under any, loaded under any other, the next steps are the same."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.checkpoint import CheckpointStore
from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ParameterSharding,
    Shard,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    Span,
)
from rayrec.models import DLRM
from tests.checkpoint.test_store import adam, tables, train
from tests.device import DEVICE
from tests.distributed.oracle import cut
from tests.ranks import on_ranks

T = ShardingType
WORLDS = (1, 2, 4)
PLANS = ("tw", "rw", "cw", "dp", "grid", "mixed", "dense")


def plan_of(name: str, world: int) -> ShardingPlan:
    """How the two tables lie in a world."""
    ranks = list(range(world))
    hosts = [ranks[: world // 2], ranks[world // 2 :]] if world > 1 else [ranks]
    last = [world - 1]
    kinds: dict[str, tuple[tuple[Any, Any, str], tuple[Any, Any, str]]] = {
        "tw": ((T.TABLE_WISE, last, "fused"), (T.TABLE_WISE, [0], "fused")),
        "rw": ((T.ROW_WISE, ranks, "fused"), (T.ROW_WISE, ranks, "fused")),
        "cw": ((T.COLUMN_WISE, ranks, "fused"), (T.COLUMN_WISE, ranks[::-1], "fused")),
        "dp": ((T.DATA_PARALLEL, ranks, "fused"), (T.DATA_PARALLEL, ranks, "fused")),
        "grid": ((T.GRID_SHARD, hosts, "fused"), (T.GRID_SHARD, hosts, "fused")),
        "mixed": ((T.COLUMN_WISE, ranks, "fused"), (T.DATA_PARALLEL, ranks, "fused")),
        "dense": ((T.ROW_WISE, ranks, "dense"), (T.DATA_PARALLEL, ranks, "dense")),
    }
    cuts = {table.name: cut(table, *how) for table, how in zip(tables(), kinds[name], strict=True)}
    return ShardingPlan({"embedding_bags": cuts})


def build(group: dist.ProcessGroup, plan: ShardingPlan, optimizer: EmbOptimType = EmbOptimType.EXACT_ADAGRAD) -> Any:
    model = DistributedModelParallel(
        DLRM(tables(), 2, dense_arch=[16], over_arch=[8, 1], seed=3),
        env=ShardingEnv.from_process_group(group),
        device=DEVICE,
        plan=plan,
        sharders=[EmbeddingBagCollectionSharder({"optimizer": optimizer, "learning_rate": 0.1})],
    )
    return model, adam(model.dense_parameters().values())


def save(group: dist.ProcessGroup, root: str, name: str) -> list[float]:
    model, dense = build(group, plan_of(name, group.size()))
    train(model, dense, group, range(3))
    CheckpointStore(root).save(3, model, dense, group=group)
    return train(model, dense, group, range(3, 5))


def load_each(group: dist.ProcessGroup, roots: list[str], name: str) -> list[list[float]]:
    losses = []
    for root in roots:
        model, dense = build(group, plan_of(name, group.size()))
        store = CheckpointStore(root)
        checkpoint = store.latest()
        assert checkpoint is not None
        store.load(checkpoint, model, dense, group)
        losses.append(train(model, dense, group, range(3, 5)))
    return losses


@pytest.mark.long
@pytest.mark.parametrize("dense", [False, True], ids=["fused", "dense"])
def test_every_pair_of_plans_and_worlds(tmp_path: Path, dense: bool) -> None:
    """Tables that train inside backward cannot become dense ones, so those are pairs among themselves."""
    cells = [(name, world) for name in PLANS for world in WORLDS if (name == "dense") is dense]
    roots, wanted = [], []
    for name, world in cells:
        root = str(tmp_path / f"{name}-{world}")
        wanted.append(torch.tensor(on_ranks(world, save, root, name)).mean(0))
        roots.append(root)
    for name, world in cells:
        found = torch.tensor(on_ranks(world, load_each, roots, name, timeout_s=350)).mean(0)
        for cell, losses, before in zip(cells, found, wanted, strict=True):
            told = f"saved as {cell}, loaded as {(name, world)}"
            torch.testing.assert_close(losses, before, atol=1e-5, rtol=1e-5, msg=partial("{}: {}".format, told))


def columns(group: dist.ProcessGroup, root: str, edge: int, values: tuple[float, float] | None) -> list[float]:
    """A table whose columns are cut at `edge` over two ranks; saves row state `values`, or loads and returns it."""
    cuts = {}
    for table in tables():
        rows = Span(0, table.num_embeddings)
        spans = [Span(0, edge), Span(edge, 16)]
        shards = tuple(Shard(table=table.name, rows=rows, cols=span, rank=rank) for rank, span in enumerate(spans))
        cuts[table.name] = ParameterSharding(sharding_type="column_wise", compute_kernel="fused", shards=shards)
    model, dense = build(group, ShardingPlan({"embedding_bags": cuts}), EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    state = [item.state["momentum1"] for table in model.tables().values() for item in table.local]
    store = CheckpointStore(root)
    if values is not None:
        for one in state:
            one.fill_(values[group.rank()])
        store.save(1, model, dense, group=group)
    else:
        checkpoint = store.latest()
        assert checkpoint is not None
        store.load(checkpoint, model, dense, group)
    return sorted({value for one in state for value in one.tolist()})


def test_row_wise_state_is_weighed_by_the_columns_that_it_stood_for(tmp_path: Path) -> None:
    """Saved as 8 + 8 columns, loaded as 4 + 12: of the 12, four had state 1 and eight had state 3."""
    on_ranks(2, columns, str(tmp_path), 8, (1.0, 3.0))
    first, second = on_ranks(2, columns, str(tmp_path), 4, None)
    assert first == [1.0]
    assert second == [pytest.approx((4 * 1 + 8 * 3) / 12)]
