"""Embedding collections inside models: default plans, state, checkpoints, outputs as users read them, wrong use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.checkpoint import CheckpointStore
from rayrec.distributed import (
    BF16,
    FP16,
    FP32,
    Awaitable,
    Codec,
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    EmbOptimType,
    ModuleSharding,
    NumberFormat,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    fp8_rows,
    int8_rows,
)
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor
from tests.device import DEVICE
from tests.distributed.oracle import cut, draw_kjt, join
from tests.ranks import on_ranks

T = ShardingType
KINDS: dict[str, list[tuple[ShardingType, Any]]] = {
    "tw": [(T.TABLE_WISE, [0]), (T.TABLE_WISE, [1])],
    "rw": [(T.ROW_WISE, [0, 1])] * 2,
    "cw": [(T.COLUMN_WISE, [1, 0])] * 2,
    "dp": [(T.DATA_PARALLEL, [0, 1])] * 2,
    "mixed": [(T.ROW_WISE, [1, 0]), (T.DATA_PARALLEL, [0, 1])],
}
ADAGRAD = EmbOptimType.EXACT_ADAGRAD


def tables() -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(name="item", num_embeddings=13, embedding_dim=8, feature_names=["clicked", "bought"]),
        EmbeddingConfig(name="shop", num_embeddings=5, embedding_dim=8, feature_names=["shops"]),
    ]


def plan_of(name: str) -> ModuleSharding:
    return {t.name: cut(t, kind, ranks) for t, (kind, ranks) in zip(tables(), KINDS[name], strict=True)}


def shard(group: dist.ProcessGroup, name: str, ec: EmbeddingCollection | None = None, **settings: Any) -> Any:
    sharder = EmbeddingCollectionSharder({"optimizer": ADAGRAD, "learning_rate": 0.1}, **settings)
    env = ShardingEnv.from_process_group(group)
    return sharder.shard(ec or EmbeddingCollection(tables(), seed=3), plan_of(name), env, DEVICE)


def facts_of_one_table(group: dist.ProcessGroup) -> tuple[Any, ...]:
    (table, *_) = tables()
    whole = EmbeddingCollection([table], need_indices=True)
    plan = {table.name: cut(table, T.TABLE_WISE, [0])}
    sharded = EmbeddingCollectionSharder().shard(whole, plan, ShardingEnv.from_process_group(group), DEVICE)
    return sharded.embedding_dim(), sharded.need_indices(), [config.name for config in sharded.embedding_configs()]


def test_a_sharded_collection_of_one_table_tells_its_facts() -> None:
    assert on_ranks(1, facts_of_one_table) == [(8, True, ["item"])]


class Histories(nn.Module):
    """Sums of transformed vectors: a model that needs each id's own vector, next to pooled ones."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.ec = EmbeddingCollection(tables(), seed=seed)
        bags = EmbeddingBagConfig(name="bag", num_embeddings=5, embedding_dim=8, feature_names=["shops"])
        self.ebc = EmbeddingBagCollection([bags], seed=seed + 1)
        self.layer, self.head = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        vectors = self.ec(kjt)
        total = self.ebc(kjt)["shops"]
        for name in ("bought", "shops", "clicked"):
            jt = vectors[name]
            example = torch.repeat_interleave(torch.arange(jt.lengths().numel()), jt.lengths())
            total = total.index_add(0, example, torch.tanh(self.layer(jt.values())))
        return self.head(total).squeeze(1).square().mean()


def batches(seed: int, ranks: int) -> list[KeyedJaggedTensor]:
    generator = torch.Generator().manual_seed(seed)
    return [draw_kjt(generator, tables(), 8 // ranks, 3) for _ in range(ranks)]


def build(
    group: dist.ProcessGroup | None, plan: str | None, seed: int, rule: EmbOptimType = EmbOptimType.EXACT_SGD
) -> tuple[DistributedModelParallel, Any]:
    torch.manual_seed(seed)
    world = group.size() if group else 1
    chosen = None
    if plan is not None and world > 1:
        bag = EmbeddingBagConfig(name="bag", num_embeddings=5, embedding_dim=8, feature_names=["shops"])
        chosen = ShardingPlan({"ec": plan_of(plan), "ebc": {"bag": cut(bag, T.ROW_WISE, [0, 1])}})
    env = ShardingEnv.from_process_group(group) if group else ShardingEnv.from_local(1, 0)
    settings = {"optimizer": rule}
    model = DistributedModelParallel(
        Histories(seed),
        env=env,
        device=DEVICE,
        plan=chosen,
        sharders=[EmbeddingCollectionSharder(settings), EmbeddingBagCollectionSharder(settings)],
    )
    for one in model.fused_optimizer.param_groups:
        one["lr"] = 0.1
    return model, torch.optim.SGD(model.dense_parameters().values(), lr=0.1)


def train(model: nn.Module, optimizer: Any, parts: list[KeyedJaggedTensor], fused: Any = None) -> float:
    optimizer.zero_grad()
    if fused is not None:
        fused.zero_grad()
    loss = model(parts[0])
    loss.backward()
    optimizer.step()
    return loss.item()


def train_on_rank(group: dist.ProcessGroup, plan: str | None) -> Any:
    model, optimizer = build(group, plan, seed=1)
    losses = []
    for step in range(3):
        losses.append(train(model, optimizer, [batches(step, 2)[group.rank()]], model.fused_optimizer))
    tables_ = {name: [(i.shard, i.weight.clone()) for i in table.local] for name, table in model.tables().items()}
    return losses, tables_, list(model.state_dict()), {n: p.detach() for n, p in model.dense_parameters().items()}


@pytest.mark.parametrize("plan", [None, *KINDS])
def test_a_model_with_both_kinds_of_collection_equals_one_process(plan: str | None) -> None:
    torch.manual_seed(1)
    model = Histories(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = [train(model, optimizer, [join(batches(step, 2))]) for step in range(3)]
    expected = model.state_dict()
    answers = on_ranks(2, train_on_rank, plan)
    torch.testing.assert_close(
        torch.tensor([a[0] for a in answers]).mean(0), torch.tensor(losses), atol=1e-5, rtol=1e-5
    )
    for _, shards, names, dense in answers:
        assert names == list(expected)
        for name, value in dense.items():
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4)
        for name, pieces in shards.items():
            for where, piece in pieces:
                part = expected[f"{name}.weight"]
                part = part[where.rows.start : where.rows.stop, where.cols.start : where.cols.stop]
                torch.testing.assert_close(piece, part, atol=1e-5, rtol=1e-4)


def save_run(group: dist.ProcessGroup, root: str, plan: str, rule: EmbOptimType) -> list[float]:
    model, optimizer = build(group, plan, 1, rule)
    for step in range(2):
        train(model, optimizer, [batches(step, 2)[group.rank()]], model.fused_optimizer)
    CheckpointStore(root).save(2, model, optimizer, {}, group)
    return [train(model, optimizer, [batches(s, 2)[group.rank()]], model.fused_optimizer) for s in (2, 3)]


def load_run(group: dist.ProcessGroup, root: str, plan: str, rule: EmbOptimType) -> list[float]:
    world = group.size()
    model, optimizer = build(group if world > 1 else None, plan, 2, rule)
    store = CheckpointStore(root)
    checkpoint = store.latest()
    assert checkpoint is not None
    store.load(checkpoint, model, optimizer, group)
    parts = [batches(s, 2) for s in (2, 3)]
    mine = [join(part) if world == 1 else part[group.rank()] for part in parts]
    return [train(model, optimizer, [kjt], model.fused_optimizer) for kjt in mine]


@pytest.mark.parametrize("rule", [ADAGRAD, EmbOptimType.ADAM], ids=lambda rule: rule.value)
@pytest.mark.parametrize(
    "saved, loaded, world", [("rw", "cw", 2), ("cw", "dp", 2), ("dp", "mixed", 2), ("mixed", "tw", 1)]
)
def test_a_checkpoint_goes_on_under_another_plan(
    tmp_path: Path, saved: str, loaded: str, world: int, rule: EmbOptimType
) -> None:
    before = torch.tensor(on_ranks(2, save_run, str(tmp_path), saved, rule)).mean(0)
    after = torch.tensor(on_ranks(world, load_run, str(tmp_path), loaded, rule)).mean(0)
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)


def first_weights(group: dist.ProcessGroup, name: str, device: str) -> Any:
    sharded = shard(group, name, EmbeddingCollection(tables(), device=device, seed=11))
    loaded = shard(group, name, EmbeddingCollection(tables(), device="meta", seed=2))
    loaded.load_state_dict(sharded.state_dict())
    again = shard(group, name, EmbeddingCollection(tables(), device="meta", seed=4))
    again.load_state_dict(EmbeddingCollection(tables(), seed=11).state_dict())
    return [
        [(i.shard, i.weight.clone()) for t in module.tables().values() for i in t.local]
        for module in (sharded, loaded, again)
    ]


@pytest.mark.parametrize("device", ["meta", "cpu"])
@pytest.mark.parametrize("name", list(KINDS))
def test_weights_and_state_dicts_do_not_depend_on_the_plan(name: str, device: str) -> None:
    expected = EmbeddingCollection(tables(), seed=11).state_dict()
    for answer in on_ranks(2, first_weights, name, device):
        for pieces in answer:
            for where, weight in pieces:
                part = expected[f"embeddings.{where.table}.weight"]
                assert torch.equal(weight, part[where.rows.start : where.rows.stop, where.cols.start : where.cols.stop])


def replicas(group: dist.ProcessGroup, dedup: bool) -> Any:
    sharded = shard(group, "dp", dedup=dedup)
    generator = torch.Generator().manual_seed(group.rank())
    for _ in range(4):
        out = sharded(draw_kjt(generator, tables(), 300, 4))
        sum(jt.values().square().mean() for jt in out.values()).backward()
    return [i.weight.clone() for t in sharded.tables().values() for i in t.local]


@pytest.mark.parametrize("dedup", [False, True])
def test_replicas_stay_bit_identical(dedup: bool) -> None:
    first, second = on_ranks(2, replicas, dedup)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def read_in_every_way(group: dist.ProcessGroup, name: str) -> Any:
    """Outputs as users read them: lazily, with indices, without gradients, and only in part."""
    ec = EmbeddingCollection(tables(), seed=3, need_indices=True)
    sharded = shard(group, name, ec)
    generator = torch.Generator().manual_seed(group.rank())
    kjt = draw_kjt(generator, tables(), 4, 3)
    expected = ec(kjt)
    out = sharded(kjt)
    assert isinstance(out, Awaitable)
    assert list(out) == list(expected) and len(out) == 3 and "shops" in out and "other" not in out
    for feature, jt in out.items():
        assert torch.equal(jt.weights(), expected[feature].weights())
        assert torch.equal(jt.lengths(), expected[feature].lengths())
        assert [v.tolist() for v in jt.to_dense()] == [v.tolist() for v in expected[feature].to_dense()]
    with torch.no_grad():
        assert not sharded(kjt)["shops"].values().requires_grad
    # ranks whose losses read different features do not wait for each other
    out = sharded(kjt)
    out[["shops", "bought"][group.rank()]].values().sum().backward()
    return True


@pytest.mark.parametrize("name", list(KINDS))
def test_outputs_are_those_of_the_unsharded_module(name: str) -> None:
    assert on_ranks(2, read_in_every_way, name) == [True, True]


def features_of_unlike_batch(group: dist.ProcessGroup, name: str) -> Any:
    """Batch sizes that vary by key are no matter: vectors go by id."""
    ec = EmbeddingCollection(tables(), seed=3)
    lengths = {"clicked": [2, 0, 1], "bought": [1], "shops": [0, 2]}
    kjt = KeyedJaggedTensor.from_jt_dict(
        {key: JaggedTensor(torch.arange(sum(n)) + group.rank(), lengths=torch.tensor(n)) for key, n in lengths.items()}
    )
    out, expected = shard(group, name, ec, dedup=True)(kjt), ec(kjt)
    return all(
        torch.equal(out[key].values(), jt.values()) and torch.equal(out[key].lengths(), jt.lengths())
        for key, jt in expected.items()
    )


@pytest.mark.parametrize("name", ["rw", "mixed"])
def test_batch_sizes_may_vary_by_key(name: str) -> None:
    assert on_ranks(2, features_of_unlike_batch, name) == [True, True]


def ids_that_travel(group: dist.ProcessGroup, dedup: bool) -> int:
    sharded = shard(group, "rw", dedup=dedup)
    kjt = KeyedJaggedTensor(["clicked", "bought", "shops"], torch.tensor([7] * 90), lengths=torch.tensor([30] * 3))
    return sum(lookups.ids.numel() for lookups in _routed(sharded, kjt).values())


def _routed(sharded: Any, kjt: KeyedJaggedTensor) -> Any:
    kjt = KeyedJaggedTensor(kjt.keys(), kjt.values() % 5, lengths=kjt.lengths())
    return sharded.input_dist(kjt).wait().lookups


def test_deduplicated_ids_travel_once() -> None:
    """Three features of each rank, one distinct id each."""
    assert sum(on_ranks(2, ids_that_travel, False)) == 180
    assert sum(on_ranks(2, ids_that_travel, True)) == 6


def travel_in(group: dist.ProcessGroup, forward: NumberFormat, backward: NumberFormat) -> Any:
    ec = EmbeddingCollection(tables(), seed=3)
    sharded = shard(group, "cw", ec, codec=Codec(forward, backward))
    kjt = draw_kjt(torch.Generator().manual_seed(group.rank()), tables(), 50, 3)
    out, expected = sharded(kjt), ec(kjt)
    sum(jt.values().square().sum() for jt in out.values()).backward()
    return max((out[key].values() - jt.values()).abs().max().item() for key, jt in expected.items())


def test_vectors_may_travel_in_fewer_bits() -> None:
    assert max(on_ranks(2, travel_in, FP32, FP32)) == 0
    assert 0 < max(on_ranks(2, travel_in, BF16, FP16)) < 4e-3
    assert 0 < max(on_ranks(2, travel_in, int8_rows(), fp8_rows())) < 8e-3


def error_of_lookup(group: dist.ProcessGroup, name: str, inputs: list[Any], dedup: bool) -> str:
    sharded = shard(group, name, dedup=dedup)
    try:
        sharded(inputs[group.rank()]).wait()
    except ValueError as error:
        return str(error)
    return "no error"


def one_each(keys: list[str], ids: list[int]) -> KeyedJaggedTensor:
    return KeyedJaggedTensor(keys, torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))


@pytest.mark.parametrize("dedup", [False, True])
@pytest.mark.parametrize("name", list(KINDS))
@pytest.mark.parametrize(
    "bad, text",
    [
        (one_each(["clicked", "bought", "shops"], [1, 2, 5]), "feature 'shops': id 5 is outside the rows [0, 5) of"),
        (one_each(["clicked", "bought", "shops"], [1, -2, 4]), "feature 'bought': id -2 is outside the rows [0, 13)"),
        (one_each(["clicked", "shops"], [1, 2]), "no feature 'bought'"),
    ],
)
def test_a_bad_batch_on_one_rank_is_an_error_on_all(name: str, bad: Any, text: str, dedup: bool) -> None:
    good = one_each(["clicked", "bought", "shops"], [1, 2, 3])
    errors = on_ranks(2, error_of_lookup, name, [good, bad], dedup)
    assert text in errors[1]
    assert "rank 1" in errors[0]


def test_wrong_plans_and_settings_are_refused_by_name() -> None:
    env, device = ShardingEnv.from_local(1, 0), DEVICE
    ec = EmbeddingCollection(tables(), device="meta")
    with pytest.raises(ValueError, match=r"'lr' is not a setting; there are .*learning_rate"):
        EmbeddingCollectionSharder({"lr": 0.1})
    sharder = EmbeddingCollectionSharder()
    with pytest.raises(ValueError, match="table 'shop'; plan again"):
        sharder.shard(ec, {"item": plan_of("rw")["item"]}, env, device)
    with pytest.raises(ValueError, match="table 'item': the plan uses rank 1, but there are 1 ranks"):
        sharder.shard(ec, plan_of("rw"), env, device)
    with pytest.raises(ValueError, match="2 ranks need a process group"):
        sharder.shard(ec, plan_of("rw"), ShardingEnv.from_local(2, 0), device)
