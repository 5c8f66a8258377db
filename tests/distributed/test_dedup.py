"""Ids sent once and pooled where they came from: the same function as one plain process, at as many collectives."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.distributed import EmbeddingBagCollectionSharder, ModuleSharding, ShardingEnv, ShardingType, comm
from rayrec.distributed.ids.routes import PlannedTable, make_routes
from rayrec.distributed.vectors.dedup import MOST_DISTINCT, Distinct
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train.setup import build
from tests.device import DEVICE, drawn
from tests.distributed.oracle import ADAGRAD, ROWWISE, SGD, cut, draw_kjt, targets, train_plain
from tests.distributed.test_equality import MIXED, check, uniform
from tests.distributed.test_properties import assert_same, problems
from tests.ranks import on_ranks
from tests.train import small


@pytest.mark.parametrize("kind", list(ShardingType), ids=lambda kind: kind.value)
def test_every_sharding_type_equals_one_process(kind: ShardingType) -> None:
    check(4, uniform(kind, 4), ADAGRAD, dedup=True)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    "kinds, params",  # cut by columns, the parts of a row have row-wise sums of their own
    [(MIXED, ADAGRAD), (uniform(ShardingType.ROW_WISE, 2), ROWWISE)],
    ids=["mixed-adagrad", "rw-rowwise"],
)
def test_sums_and_means_equal_one_process(
    kinds: list[Any], params: dict[str, Any], pooling: PoolingType, weighted: bool
) -> None:
    check(2, kinds, params, pooling, weighted, dedup=True)


@pytest.mark.parametrize("sizes", [(5, 2), (0, 4)])
@pytest.mark.parametrize("kinds", [uniform(ShardingType.ROW_WISE, 2), MIXED], ids=["rw", "mixed"])
def test_ranks_may_bring_batches_of_different_size(sizes: tuple[int, ...], kinds: list[Any]) -> None:
    check(2, kinds, ADAGRAD, PoolingType.MEAN, weighted=True, batch_sizes=sizes, dedup=True)


@settings(max_examples=drawn(25), suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_drawn_plans_equal_one_process(problem: Any) -> None:
    tables, plan, sizes, weighted, seed = problem
    generator = torch.Generator().manual_seed(seed)
    steps = [[draw_kjt(generator, tables, size, 6, weighted) for size in sizes] for _ in range(2)]
    ebc = EmbeddingBagCollection(tables, is_weighted=weighted, seed=seed)
    assert_same(ebc, plan, steps, ADAGRAD, train_plain(ebc, steps, ADAGRAD), dedup=True)


def pays(features: dict[str, torch.Tensor], rows: int) -> bool:
    """Whether a batch of these features is deduplicated, where the last feature's table is replicated."""
    tables = [
        EmbeddingConfig(name=f"t{name}", num_embeddings=rows, embedding_dim=8, feature_names=[name])
        for name in [*features][:-1]
    ]
    planned = [PlannedTable(table, cut(table, ShardingType.TABLE_WISE, [0]), None) for table in tables]
    routes = make_routes(planned, 1, lambda table: ())
    ids = torch.cat([*features.values()])
    lengths = torch.tensor([len(values) for values in features.values()])
    return Distinct(tables, False, routes).pays(KeyedJaggedTensor([*features], ids, lengths=lengths, stride=1))


@settings(max_examples=drawn(60))
@given(
    count=st.integers(0, 40_000),
    distinct=st.integers(1, 40_000),
    step=st.integers(1, 10_000),
    seed=st.integers(0, 100),
    dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_it_pays_if_few_ids_are_distinct(count: int, distinct: int, step: int, seed: int, dtype: torch.dtype) -> None:
    """Two features with the same ids are distinct; ids of replicated tables do not count."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randint(distinct, (count,), generator=generator).to(dtype) * step for _ in range(2))
    other = torch.zeros(3 * count, dtype=dtype)
    share = (first.unique().numel() + second.unique().numel()) / max(1, 2 * count)
    found = pays({"a": first, "b": second, "c": other}, distinct * step)
    if 2 * count > 20_000 and distinct > 1000 and abs(share - MOST_DISTINCT) > 0.1:
        assert found == (share < MOST_DISTINCT)
    if 2 * count < 64:
        assert not found


TABLES = [
    EmbeddingBagConfig(name="a", num_embeddings=9, embedding_dim=16, feature_names=["f1", "f2"]),
    EmbeddingBagConfig(name="b", num_embeddings=5, embedding_dim=16, feature_names=["f2"], pooling=PoolingType.MEAN),
    EmbeddingBagConfig(name="c", num_embeddings=7, embedding_dim=16, feature_names=["f3"]),
]
PLAN = {
    "a": cut(TABLES[0], ShardingType.ROW_WISE, [0, 1]),
    "b": cut(TABLES[1], ShardingType.COLUMN_WISE, [1, 0]),
    "c": cut(TABLES[2], ShardingType.DATA_PARALLEL, [0, 1]),
}


def shard(group: dist.ProcessGroup, ebc: EmbeddingBagCollection, plan: ModuleSharding, dedup: bool) -> Any:
    sharder = EmbeddingBagCollectionSharder(SGD, dedup=dedup)
    return sharder.shard(ebc, plan, ShardingEnv.from_process_group(group), DEVICE)


def weight_gradient(group: dist.ProcessGroup, batches: list[KeyedJaggedTensor], dedup: bool) -> tuple[Any, Any]:
    sharded = shard(group, EmbeddingBagCollection(TABLES, is_weighted=True, seed=1), PLAN, dedup)
    kjt = batches[group.rank()]
    weights = kjt.weights().clone().requires_grad_()
    given = KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, lengths=kjt.lengths(), stride=kjt.stride())
    with comm.count_collectives() as counts:
        targets(sharded(given).wait()).sum().backward()
    return weights.grad, dict(counts)


def test_gradients_of_the_weights_are_those_of_one_process_and_never_travel() -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [draw_kjt(generator, TABLES, size, 5, weighted=True) for size in (4, 3)]
    with_dedup = on_ranks(2, weight_gradient, batches, True)
    without = on_ranks(2, weight_gradient, batches, False)
    for kjt, (grad, counts), (grad_flat, counts_flat) in zip(batches, with_dedup, without, strict=True):
        plain = EmbeddingBagCollection(TABLES, is_weighted=True, seed=1)
        weights = kjt.weights().clone().requires_grad_()
        given = KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, lengths=kjt.lengths(), stride=kjt.stride())
        targets(plain(given)).sum().backward()
        torch.testing.assert_close(grad, weights.grad, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(grad, grad_flat, atol=1e-5, rtol=1e-5)
        assert sum(counts.values()) == sum(counts_flat.values()) - 1


def answer_to(group: dist.ProcessGroup, batches: list[KeyedJaggedTensor]) -> str:
    sharded = shard(group, EmbeddingBagCollection(TABLES, seed=1), PLAN, True)
    with pytest.raises(ValueError) as error:
        sharded(batches[group.rank()]).wait()
    return str(error.value)


def test_an_id_outside_its_table_stops_every_rank() -> None:
    good = draw_kjt(torch.Generator().manual_seed(2), TABLES, 3, 5)
    bad = KeyedJaggedTensor(["f1", "f2", "f3"], torch.tensor([1, 5, 2]), lengths=torch.tensor([1, 1, 1]))
    mine, other = on_ranks(2, answer_to, [bad, good])
    assert "'f2': id 5" in mine
    assert "rank 0" in other


def test_one_process_and_replicated_tables_alone_need_no_exchange() -> None:
    kjt = draw_kjt(torch.Generator().manual_seed(2), TABLES, 3, 5)
    ebc = EmbeddingBagCollection(TABLES, seed=1)
    for kind in (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL):
        plan = {table.name: cut(table, kind, [0]) for table in TABLES}
        sharded = EmbeddingBagCollectionSharder(dedup=True).shard(ebc, plan, ShardingEnv.from_local(1, 0), DEVICE)
        torch.testing.assert_close(sharded(kjt).wait().values(), ebc(kjt).values())
        on_host = DEVICE.type == "cpu" and kind is ShardingType.TABLE_WISE  # one GPU sends no ids
        assert ("each distinct id once" in sharded.extra_repr()) is on_host


def test_a_batch_without_any_id_trains_too() -> None:
    ebc = EmbeddingBagCollection(TABLES, is_weighted=True, seed=1)
    generator = torch.Generator().manual_seed(2)
    steps = [[draw_kjt(generator, TABLES, 3, longest, weighted=True) for longest in pair] for pair in ((0, 4), (0, 0))]
    assert_same(ebc, PLAN, steps, SGD, train_plain(ebc, steps, SGD), dedup=True)


def test_a_config_sets_it_for_lookups_id_by_id() -> None:
    """YAML reads `on` and `off` as booleans."""
    for text, dedup in (("auto", "auto"), ("on", True), ("off", False)):
        bags, sequences = build.sharders(small.config_of(f"sharding.dedup={text}"))
        assert (bags._dedup, sequences._dedup) == (False, dedup)
    with pytest.raises(ValueError, match=r"sharding\.dedup"):
        small.config_of("sharding.dedup=often")
