"""DistributedModelParallel: a whole model under every plan equals one process, at a constant number of collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ModuleSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    comm,
)
from rayrec.models import DLRM, Batch
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from tests.device import DEVICE, exchanges
from tests.distributed.oracle import cut, draw_kjt, join
from tests.ranks import on_ranks

T = ShardingType
FUSED = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.05}
NAMES = ["user", "item", "genre", "city"]


def tables() -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(name="user", num_embeddings=40, embedding_dim=16, feature_names=["user"]),
        EmbeddingBagConfig(name="item", num_embeddings=60, embedding_dim=16, feature_names=["item", "liked"]),
        EmbeddingBagConfig(
            name="genre", num_embeddings=9, embedding_dim=16, feature_names=["genres"], pooling=PoolingType.MEAN
        ),
        EmbeddingBagConfig(name="city", num_embeddings=5, embedding_dim=16, feature_names=["city"]),
    ]


def plans(world: int) -> dict[str, ModuleSharding]:
    everyone = list(range(world))
    kinds: dict[str, list[tuple[ShardingType, Any]]] = {
        "table_wise": [(T.TABLE_WISE, [n % world]) for n in range(4)],
        "row_wise": [(T.ROW_WISE, everyone)] * 4,
        "column_wise": [(T.COLUMN_WISE, everyone)] * 4,
        "data_parallel": [(T.DATA_PARALLEL, everyone)] * 4,
        "mixed": [(T.ROW_WISE, everyone), (T.COLUMN_WISE, everyone), (T.DATA_PARALLEL, everyone), (T.TABLE_WISE, [0])],
    }
    return {
        name: {t.name: cut(t, kind, ranks) for t, (kind, ranks) in zip(tables(), chosen, strict=True)}
        for name, chosen in kinds.items()
    }


def model_and_optimizer(seed: int = 5) -> tuple[DLRM, Any]:
    torch.manual_seed(seed)
    model = DLRM(tables(), 3, dense_arch=[16, 16], over_arch=[16, 1], tables_device="cpu", seed=seed)
    return model, lambda params: torch.optim.Adam(params, lr=0.01)


def batches(world: int, steps: int = 4) -> list[list[Batch]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [
            Batch(
                torch.rand(6, 3, generator=generator),
                draw_kjt(generator, tables(), 6, 3),
                torch.randint(0, 2, (6,), generator=generator).float(),
            )
            for _ in range(world)
        ]
        for _ in range(steps)
    ]


def whole(parts: list[Batch]) -> Batch:
    return Batch(
        torch.cat([p.dense for p in parts]), join([p.sparse for p in parts]), torch.cat([p.label for p in parts])
    )


def train_alone(world: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    model, make = model_and_optimizer()
    bags = list(model.embedding_bags.parameters())
    dense = make([p for name, p in model.named_parameters() if not name.startswith("embedding_bags")])
    sparse = torch.optim.Adagrad(bags, lr=0.05, eps=1e-8)
    losses = []
    for parts in batches(world):
        loss, _ = model(whole(parts))
        dense.zero_grad()
        sparse.zero_grad()
        loss.backward()
        dense.step()
        sparse.step()
        losses.append(loss.item())
    return losses, {name: value.detach() for name, value in model.state_dict().items()}


def train_on_rank(group: dist.ProcessGroup, plan: ModuleSharding) -> Any:
    model, make = model_and_optimizer()
    dmp = DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group),
        device=DEVICE,
        plan=ShardingPlan({"embedding_bags": plan}),
        sharders=[EmbeddingBagCollectionSharder(FUSED)],
    )
    dense = make(dmp.dense_parameters().values())
    losses, counts = [], []
    for parts in batches(group.size()):
        with comm.count_collectives() as counter:
            loss, _ = dmp(parts[group.rank()])
            dense.zero_grad()
            loss.backward()
            dense.step()
        losses.append(loss.item())
        counts.append(dict(counter))
    shards = {
        f"{name}.weight": [(item.shard, item.weight.clone()) for item in table.local]
        for name, table in dmp.tables().items()
    }
    others = {name: p.detach().clone() for name, p in dmp.dense_parameters().items()}
    return losses, counts, shards, others, list(dmp.state_dict())


@pytest.mark.parametrize("world", [1, 2, 4])
@pytest.mark.parametrize("name", list(plans(2)))
def test_every_parameter_equals_one_process_on_the_global_batch(name: str, world: int) -> None:
    losses, expected = train_alone(world)
    answers = on_ranks(world, train_on_rank, plans(world)[name])
    torch.testing.assert_close(
        torch.tensor([a[0] for a in answers]).mean(0), torch.tensor(losses), atol=1e-5, rtol=1e-5
    )
    for _, _, shards, others, names in answers:
        assert names == list(expected)
        for parameter, value in others.items():
            torch.testing.assert_close(value, expected[parameter], atol=1e-5, rtol=1e-4)
        for table, pieces in shards.items():
            for shard, piece in pieces:
                part = expected[table][shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop]
                torch.testing.assert_close(piece, part, atol=1e-5, rtol=1e-4)
    held = {(table, shard.rows, shard.cols) for a in answers for table, pieces in a[2].items() for shard, _ in pieces}
    assert {table for table, _, _ in held} == {f"embedding_bags.embedding_bags.{t}.weight" for t in NAMES}


def test_a_step_costs_a_constant_number_of_collectives_whatever_the_plan() -> None:
    """Ids, vectors, gradients; one more with replicated tables. Never one a table or sharding type."""
    for name, plan in plans(2).items():
        expected = exchanges(3)
        if name == "data_parallel":
            expected = exchanges(1) | {"all_gather": 1}
        if name == "mixed":
            expected = expected | {"all_gather": 1}
        for answer in on_ranks(2, train_on_rank, plan):
            assert answer[1] == [expected] * 4, name


def init_weights(group: dist.ProcessGroup, plan: ModuleSharding, device: str) -> Any:
    ebc = EmbeddingBagCollection(tables(), device=device, seed=11)
    sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, ShardingEnv.from_process_group(group), DEVICE)
    return [(i.shard, i.weight.clone()) for t in sharded.tables().values() for i in t.local]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("name", list(plans(2)))
def test_first_weights_do_not_depend_on_the_plan(name: str, device: str) -> None:
    expected = EmbeddingBagCollection(tables(), seed=11).state_dict()
    for answer in on_ranks(2, init_weights, plans(2)[name], device):
        for shard, weight in answer:
            table = expected[f"embedding_bags.{shard.table}.weight"]
            assert torch.equal(weight, table[shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop])


def round_trip(group: dist.ProcessGroup, plan: ModuleSharding, whole_tensors: dict[str, torch.Tensor]) -> Any:
    env = ShardingEnv.from_process_group(group)
    ebc = EmbeddingBagCollection(tables(), device="meta", seed=1)
    sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, env, DEVICE)
    sharded.load_state_dict(whole_tensors)
    again = EmbeddingBagCollectionSharder().shard(
        EmbeddingBagCollection(tables(), device="meta", seed=2), plan, env, DEVICE
    )
    again.load_state_dict(sharded.state_dict())
    return [(i.shard, i.weight.clone()) for t in again.tables().values() for i in t.local]


@pytest.mark.parametrize("name", ["mixed", "column_wise"])
def test_state_dicts_take_whole_tensors_and_their_own_output(name: str) -> None:
    whole_tensors = EmbeddingBagCollection(tables(), seed=12).state_dict()
    for answer in on_ranks(2, round_trip, plans(2)[name], dict(whole_tensors)):
        for shard, weight in answer:
            table = whole_tensors[f"embedding_bags.{shard.table}.weight"]
            assert torch.equal(weight, table[shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop])


def replicas(group: dist.ProcessGroup) -> Any:
    """A thousand examples, so that many rows are touched by both ranks."""
    plan = {t.name: cut(t, T.DATA_PARALLEL, [0, 1]) for t in tables()}
    ebc = EmbeddingBagCollection(tables(), seed=0)
    params = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    sharded = EmbeddingBagCollectionSharder(params).shard(ebc, plan, ShardingEnv.from_process_group(group), DEVICE)
    generator = torch.Generator().manual_seed(group.rank())
    for _ in range(5):
        out = sharded(draw_kjt(generator, tables(), 500, 4)).wait().values()
        out.square().mean().backward()
    return [i.weight.clone() for t in sharded.tables().values() for i in t.local]


def test_replicas_stay_bit_identical() -> None:
    first, second = on_ranks(2, replicas)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
