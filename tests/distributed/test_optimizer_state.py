"""The state dict of the optimizer inside backward is sharded like the weights, and goes through DCP on many ranks."""

from __future__ import annotations

import tempfile
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ModuleSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
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


def train_two_steps(model: DistributedModelParallel, generator: torch.Generator) -> None:
    for _ in range(2):
        model(draw_kjt(generator, TABLES, 16, 3)).wait().values().square().mean().backward()


def resume_by_dcp(group: dist.ProcessGroup, folder: str) -> Any:
    """Two steps, a checkpoint of torch's, and two more steps in the same model and in one that loaded it."""
    model = make(group, EmbOptimType.ADAM, 1)
    generator = torch.Generator().manual_seed(group.rank())
    train_two_steps(model, generator)
    dcp.save({"model": model.state_dict(), "optimizer": model.fused_optimizer.state_dict()}, checkpoint_id=folder)
    other = make(group, EmbOptimType.ADAM, 2)
    state = {"model": other.state_dict(), "optimizer": other.fused_optimizer.state_dict()}
    dcp.load(state, checkpoint_id=folder)
    other.load_state_dict(state["model"])
    other.fused_optimizer.load_state_dict(state["optimizer"])
    steps = {
        key: int(value) for of in state["optimizer"]["state"].values() for key, value in of.items() if "step" in key
    }
    draws = generator.get_state()
    weights = []
    for each in (model, other):
        train_two_steps(each, generator.set_state(draws))
        weights.append([item.weight.clone() for table in each.tables().values() for item in table.local])
    return weights, steps


def test_adam_goes_on_after_torchs_own_checkpoint_as_if_uninterrupted() -> None:
    """Its bias correction depends on the number of updates, which is part of the state dict."""
    with tempfile.TemporaryDirectory() as folder:
        for weights, steps in on_ranks(2, resume_by_dcp, folder):
            torch.testing.assert_close(weights[1], weights[0], atol=0, rtol=0)
            assert steps and set(steps.values()) == {2}


def test_only_optimizers_that_correct_their_bias_have_a_step_and_one_without_it_loads() -> None:
    """As in TorchRec's state dicts."""

    def optimizer_of(kind: EmbOptimType) -> Any:
        plan = {"t": cut(TABLE, ShardingType.TABLE_WISE, [0])}
        sharder = EmbeddingBagCollectionSharder({"optimizer": kind})
        sharded = sharder.shard(EmbeddingBagCollection([TABLE]), plan, ShardingEnv.from_local(1, 0), DEVICE)
        (kernel,) = sharded.kernels()
        return sharded.fused_optimizer, kernel

    TABLE = EmbeddingBagConfig(name="t", num_embeddings=6, embedding_dim=8, feature_names=["f"])
    rowwise, _ = optimizer_of(EmbOptimType.EXACT_ROWWISE_ADAGRAD)
    assert list(rowwise.state_dict()["state"]["embedding_bags.t.weight"]) == ["t.momentum1"]
    adam, kernel = optimizer_of(EmbOptimType.ADAM)
    state = adam.state_dict()
    assert state["state"]["embedding_bags.t.weight"]["t.step"].item() == 0
    kernel.iteration = 5
    del state["state"]["embedding_bags.t.weight"]["t.step"]
    adam.load_state_dict(state)
    assert kernel.iteration == 5
