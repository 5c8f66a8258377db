"""Which modules of a model are sharded, and what later changes of the model leave of them."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim.swa_utils import AveragedModel

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.distributed.planner import EmbeddingShardingPlanner, Topology
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor, KeyedTensor
from tests.device import DEVICE
from tests.distributed.oracle import cut, draw_kjt, join
from tests.ranks import on_ranks

SGD = {"learning_rate": 0.1}
TABLES = [
    EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=8, feature_names=["f"]),
    EmbeddingBagConfig(name="u", num_embeddings=12, embedding_dim=8, feature_names=["g"]),
]


def bags(device: str = "cpu") -> EmbeddingBagCollection:
    return EmbeddingBagCollection(TABLES, device=device, seed=3)


class Tower(nn.Module):
    def __init__(self, ebc: EmbeddingBagCollection) -> None:
        super().__init__()
        self.ebc = ebc
        self.over = nn.Linear(16, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.ebc(ids).values().to(self.over.weight.dtype)).float()


class TwoTowers(nn.Module):
    """Two towers over one collection."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        shared = bags()
        self.a, self.b = Tower(shared), Tower(shared)

    def forward(self, first: KeyedJaggedTensor, second: KeyedJaggedTensor) -> torch.Tensor:
        return (self.a(first) * self.b(second)).mean()


def steps(world: int) -> list[list[tuple[KeyedJaggedTensor, KeyedJaggedTensor]]]:
    generator = torch.Generator().manual_seed(2)
    return [
        [(draw_kjt(generator, TABLES, 5, 3), draw_kjt(generator, TABLES, 5, 3)) for _ in range(world)] for _ in range(3)
    ]


def train_shared(group: dist.ProcessGroup) -> Any:
    model = TwoTowers()
    names = list(model.state_dict())
    plan = {"t": cut(TABLES[0], ShardingType.ROW_WISE, [0, 1]), "u": cut(TABLES[1], ShardingType.TABLE_WISE, [1])}
    dmp = DistributedModelParallel(
        model,
        ShardingEnv.from_process_group(group),
        DEVICE,
        ShardingPlan({"a.ebc": plan}),
        [EmbeddingBagCollectionSharder(SGD)],
    )
    assert dmp.module.a.ebc is dmp.module.b.ebc
    assert isinstance(dmp.module.b.ebc, ShardedEmbeddingBagCollection)
    assert list(dmp.state_dict()) == names and list(dmp.tables()) == [
        "a.ebc.embedding_bags.t",
        "a.ebc.embedding_bags.u",
    ]
    dense = torch.optim.SGD(dmp.dense_parameters().values(), lr=0.1)
    assert set(dmp.dense_parameters()) == {f"{tower}.over.{kind}" for tower in "ab" for kind in ("weight", "bias")}
    for parts in steps(group.size()):
        dense.zero_grad()
        dmp(*parts[group.rank()]).backward()
        dense.step()
    shards = [(name, item.shard, item.weight.clone()) for name, t in dmp.tables().items() for item in t.local]
    return shards, {name: p.detach().clone() for name, p in dmp.dense_parameters().items()}


def test_a_collection_used_in_two_places_is_sharded_in_both() -> None:
    alone = TwoTowers()
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for parts in steps(2):
        plain.zero_grad()
        alone(join([first for first, _ in parts]), join([second for _, second in parts])).backward()
        plain.step()
    expected = alone.state_dict()
    for shards, others in on_ranks(2, train_shared):
        for name, shard, weight in shards:
            rows, cols = shard.rows, shard.cols
            part = expected[f"{name}.weight"][rows.start : rows.stop, cols.start : cols.stop]
            torch.testing.assert_close(weight, part, atol=1e-6, rtol=1e-5)
        for name, value in others.items():
            torch.testing.assert_close(value, expected[name], atol=1e-6, rtol=1e-5)


class Named(EmbeddingBagCollection):
    """Adds a method, and looks up as its base."""

    def size(self) -> int:
        return len(self.embedding_bag_configs())


class Doubled(EmbeddingBagCollection):
    """Looks up in another way."""

    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        out = super().forward(features)
        return KeyedTensor(out.keys(), out.length_per_key(), 2 * out.values())


def test_a_subclass_is_sharded_as_its_base_unless_it_overrides_forward() -> None:
    ids = draw_kjt(torch.Generator().manual_seed(0), TABLES, 4, 3)
    expected = bags()(ids).values()
    dmp = DistributedModelParallel(nn.Sequential(Named(TABLES, device="meta", seed=3)), device=torch.device("cpu"))
    torch.testing.assert_close(dmp(ids).values(), expected)
    with pytest.raises(ValueError, match=r"module '0': Doubled is a subclass of EmbeddingBagCollection and overrides"):
        DistributedModelParallel(nn.Sequential(Doubled(TABLES, device="meta")), device=torch.device("cpu"))
    planner = EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu"))
    sharders = [EmbeddingBagCollectionSharder()]
    with pytest.raises(ValueError, match="add a sharder with module_type=Doubled"):
        planner.plan(nn.Sequential(Doubled(TABLES, device="meta")), sharders)
    assert list(planner.plan(nn.Sequential(Named(TABLES, device="meta")), sharders).plan) == ["0"]


def test_a_sharder_for_a_subclass_goes_before_that_of_its_base() -> None:
    class DoubledSharder(EmbeddingBagCollectionSharder):
        module_type = Doubled

        def shard(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("the sharder of the subclass")

    with pytest.raises(RuntimeError, match="the sharder of the subclass"):
        DistributedModelParallel(
            nn.Sequential(Doubled(TABLES, device="meta")),
            device=torch.device("cpu"),
            sharders=[EmbeddingBagCollectionSharder(), DoubledSharder()],
        )


@pytest.mark.parametrize("change", [lambda m: m.to(torch.bfloat16), lambda m: m.bfloat16()], ids=["to", "bfloat16"])
def test_another_number_format_leaves_the_tables_on_their_kernels(change: Any) -> None:
    torch.manual_seed(1)
    dmp = DistributedModelParallel(
        Tower(bags()), device=torch.device("cpu"), sharders=[EmbeddingBagCollectionSharder(SGD)]
    )
    change(dmp)
    assert dmp.module.over.weight.dtype is torch.bfloat16
    names = [f"ebc.embedding_bags.{table.name}.weight" for table in TABLES]
    before = {name: dmp.state_dict()[name].clone() for name in names}
    for parts in steps(1):
        dmp(parts[0][0]).sum().backward()
    held = {
        table.config.name: w
        for kernel in dmp.kernels()
        for table, w in zip(kernel.tables, kernel.weights(), strict=True)
    }
    for table, name in zip(TABLES, names, strict=True):
        after = dmp.state_dict()[name]
        assert after.dtype is torch.float32 and not torch.equal(after, before[name])
        torch.testing.assert_close(after, held[table.name].detach())


def test_another_device_is_refused_before_anything_moves() -> None:
    dmp = DistributedModelParallel(Tower(bags()), device=torch.device("cpu"))
    dmp.to("cpu")
    with pytest.raises(ValueError, match="table 't' is sharded on cpu and cannot move to another device; give device"):
        dmp.to("meta")
    assert dmp.module.over.weight.device.type == "cpu"


def test_the_fused_optimizer_is_made_once() -> None:
    dmp = DistributedModelParallel(
        Tower(bags()), device=torch.device("cpu"), sharders=[EmbeddingBagCollectionSharder(SGD)]
    )
    fused = dmp.fused_optimizer
    assert dmp.fused_optimizer is fused and sorted(fused.params) == [
        "ebc.embedding_bags.t.weight",
        "ebc.embedding_bags.u.weight",
    ]
    for group in dmp.fused_optimizer.param_groups:
        group["lr"] = 0.0
    dmp.fused_optimizer.settings_changed()
    before = {name: table.local[0].weight.clone() for name, table in dmp.tables().items()}
    dmp(steps(1)[0][0][0]).sum().backward()
    assert all(torch.equal(table.local[0].weight, before[name]) for name, table in dmp.tables().items())


class TiedOutput(nn.Module):
    """An output layer with the weight of an item table, as in SASRec."""

    def __init__(self) -> None:
        super().__init__()
        self.items, self.out = bags(), nn.Linear(8, 20, bias=False)
        self.out.weight = self.items.embedding_bags["t"].weight  # type: ignore[assignment]


class TiedCollections(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = bags(), bags()
        self.item.embedding_bags["u"].weight = self.user.embedding_bags["u"].weight


class TiedTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        wide = [TABLES[0], EmbeddingBagConfig(name="v", num_embeddings=20, embedding_dim=8, feature_names=["g"])]
        self.ebc = EmbeddingBagCollection(wide, seed=3)
        self.ebc.embedding_bags["v"].weight = self.ebc.embedding_bags["t"].weight


@pytest.mark.parametrize(
    "tied, names",
    [
        (TiedOutput, "'items.embedding_bags.t.weight' and 'out.weight'"),
        (TiedCollections, "'user.embedding_bags.u.weight' and 'item.embedding_bags.u.weight'"),
        (TiedTables, "'ebc.embedding_bags.t.weight' and 'ebc.embedding_bags.v.weight'"),
    ],
)
def test_tied_tables_are_refused_by_both_names(tied: type[nn.Module], names: str) -> None:
    for shard in (
        lambda: DistributedModelParallel(tied(), device=torch.device("cpu")),
        lambda: EmbeddingShardingPlanner(topology=Topology(world_size=1, compute_device="cpu")).plan(
            tied(), [EmbeddingBagCollectionSharder()]
        ),
    ):
        with pytest.raises(ValueError, match=f"{names} are one parameter"):
            shard()


@pytest.mark.parametrize("copy_of", [copy.deepcopy, pickle.dumps, AveragedModel])
def test_copies_of_a_sharded_model_are_refused_with_what_to_do(copy_of: Any) -> None:
    dmp = DistributedModelParallel(Tower(bags()), device=torch.device("cpu"))
    with pytest.raises(TypeError, match=r"ShardedEmbeddingBagCollection cannot be copied .* average `state_dict\(\)`"):
        copy_of(dmp)
