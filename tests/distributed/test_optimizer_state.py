"""The state dict of the optimizer inside backward is sharded like the weights, and goes through DCP on many ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rayrec.distributed import DistributedModelParallel, EmbeddingBagCollectionSharder, ShardingEnv, ShardingPlan
from rayrec.distributed.kernel import EmbOptimType
from rayrec.distributed.plan.sharding_plan import ModuleSharding
from rayrec.distributed.plan.shards import ShardingType
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.device import DEVICE
from tests.distributed.oracle import cut, draw_kjt
from tests.ranks import on_ranks

T = ShardingType
TABLES = [
    EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f_{name}"])
    for name, rows, dim in [("tw", 20, 8), ("rw", 30, 8), ("cw", 24, 20), ("dp", 9, 8)]
]
PLAN: ModuleSharding = {
    "tw": cut(TABLES[0], T.TABLE_WISE, [1]),
    "rw": cut(TABLES[1], T.ROW_WISE, [0, 1]),
    "cw": cut(TABLES[2], T.COLUMN_WISE, [0, 1, 0]),  # two rectangles of unequal width on rank 0
    "dp": cut(TABLES[3], T.DATA_PARALLEL, [0, 1]),
}
OPTIMIZERS = [EmbOptimType.EXACT_ROWWISE_ADAGRAD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.ADAM]


def make(group: dist.ProcessGroup, optimizer: EmbOptimType, seed: int) -> DistributedModelParallel:
    return DistributedModelParallel(
        EmbeddingBagCollection(TABLES, seed=seed),
        env=ShardingEnv.from_process_group(group),
        device=DEVICE,
        plan=ShardingPlan({"": PLAN}),
        sharders=[EmbeddingBagCollectionSharder({"optimizer": optimizer, "learning_rate": 0.1})],
    )


def held(model: DistributedModelParallel) -> dict[Any, dict[str, torch.Tensor]]:
    return {
        item.shard: {key: value.clone() for key, value in item.state.items()}
        for table in model.tables().values()
        for item in table.local
    }


def save_and_load(group: dist.ProcessGroup, optimizer: EmbOptimType, folder: str) -> Any:
    model = make(group, optimizer, 1)
    generator = torch.Generator().manual_seed(group.rank())
    for _ in range(2):
        model(draw_kjt(generator, TABLES, 16, 3)).wait().values().square().mean().backward()
    trained = held(model)
    model.fused_optimizer.param_groups[0]["lr"] = 0.25
    dcp.save({"optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=folder)
    other = make(group, optimizer, 2)
    fresh = held(other)
    state = {"optimizer": other.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.fused_optimizer.load_state_dict(state["optimizer"])
    names = {key: list(values) for key, values in state["optimizer"]["state"].items()}
    return trained, held(other), fresh, names


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=lambda optimizer: optimizer.name)
def test_every_ranks_state_survives_torchs_own_checkpoint(optimizer: EmbOptimType) -> None:
    with tempfile.TemporaryDirectory() as folder:
        answers = on_ranks(2, save_and_load, optimizer, folder)
    shards = set()
    for trained, loaded, fresh, names in answers:
        assert all("." in key for keys in names.values() for key in keys)
        for shard, states in trained.items():
            shards.add((shard.table, shard.rows, shard.cols))
            assert states, shard
            for key, value in states.items():
                assert torch.equal(loaded[shard][key], value), (shard, key)
                assert not torch.equal(fresh[shard][key], value), (shard, key)
    assert len(shards) == 1 + 2 + 3 + 1


@pytest.mark.parametrize("optimizer", [EmbOptimType.EXACT_SGD, EmbOptimType.LARS_SGD])
@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL])
def test_the_learning_rate_of_an_update_is_that_at_its_lookup(kind: ShardingType, optimizer: EmbOptimType) -> None:
    """Whatever kernel has the table: fbgemm's, which takes it there, or one of tensor operations."""

    def trained(changed: bool) -> torch.Tensor:
        table = EmbeddingBagConfig(name="t", num_embeddings=6, embedding_dim=8, feature_names=["f"])
        params = {"optimizer": optimizer, "learning_rate": 0.1}
        plan = {"t": cut(table, kind, [0])}
        env = ShardingEnv.from_local(1, 0)
        module = EmbeddingBagCollection([table], seed=1)
        sharded = EmbeddingBagCollectionSharder(params).shard(module, plan, env, DEVICE)
        bags = sharded(KeyedJaggedTensor(["f"], torch.tensor([1, 2, 1]), lengths=torch.tensor([2, 1]))).wait().values()
        if changed:
            for group in sharded.fused_optimizer.param_groups:
                group["lr"] = 100.0
            sharded.fused_optimizer.step()
        bags.sum().backward()
        return sharded.tables()["t"].local[0].weight.clone()

    assert torch.equal(trained(True), trained(False))
