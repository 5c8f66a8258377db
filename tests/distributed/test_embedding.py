"""Vectors id by id: under any plan, forward and every weight after several steps equal one plain process."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.distributed import EmbOptimType, ModuleSharding, ShardingType
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.device import drawn, exchanges
from tests.distributed import oracle
from tests.distributed.embedding_oracle import assert_equal, train_plain, train_sharded
from tests.distributed.oracle import ADAGRAD, ROWWISE, SGD, cut, draw_kjt
from tests.ranks import on_ranks

ADAM = {"optimizer": EmbOptimType.ADAM, "learning_rate": 0.05, "eps": 1e-4}
T = ShardingType
Kinds = list[tuple[ShardingType, Any]]


def tables(data_type: DataType = DataType.FP32) -> list[EmbeddingConfig]:
    """A shared feature, tables with two features, few rows, a single row."""
    sizes = {"a": (11, ["f1"]), "b": (23, ["f2", "f3"]), "c": (3, ["f4"]), "d": (1, ["f5"]), "e": (17, ["f1", "f6"])}
    return [
        EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=16, feature_names=features, data_type=data_type)
        for name, (rows, features) in sizes.items()
    ]


def plan_of(configs: list[EmbeddingConfig], kinds: Kinds) -> ModuleSharding:
    return {table.name: cut(table, kind, ranks) for table, (kind, ranks) in zip(configs, kinds, strict=True)}


def uniform(kind: ShardingType, world: int) -> Kinds:
    everyone = list(range(world))
    hosts = [everyone[: world // 2], everyone[world // 2 :]]
    match kind:
        case T.TABLE_WISE:
            return [(kind, [number % world]) for number in range(5)]
        case T.TABLE_COLUMN_WISE:
            return [(kind, hosts[number % 2]) for number in range(5)]
        case T.TABLE_ROW_WISE:
            return [(kind, hosts[number % 2]) for number in range(5)]
        case T.GRID_SHARD:
            return [(kind, hosts)] * 5
    return [(kind, everyone)] * 5


def check(
    world: int,
    kinds: Kinds,
    fused_params: dict[str, Any],
    batch_sizes: tuple[int, ...] | None = None,
    dedup: bool | Literal["auto"] = False,
    seed: int = 7,
    longest: int = 3,
) -> list[dict[str, int]]:
    """Trains both; returns the collectives of each step on each rank."""
    configs = tables()
    ec = EmbeddingCollection(configs, seed=3)
    generator = torch.Generator().manual_seed(seed)
    sizes = batch_sizes or (6,) * world
    steps = [[draw_kjt(generator, configs, size, longest) for size in sizes] for _ in range(3)]
    answers = on_ranks(world, train_sharded, ec, plan_of(configs, kinds), steps, fused_params, dedup)
    assert_equal(answers, train_plain(ec, steps, fused_params))
    return [count for answer in answers for count in answer[2]]


@pytest.mark.parametrize(("world", "dedup"), [(2, True), (4, False)], ids=["2-dedup", "4-all"])
@pytest.mark.parametrize("kind", list(ShardingType), ids=lambda kind: kind.value)
def test_every_sharding_type_equals_one_process(kind: ShardingType, world: int, dedup: bool) -> None:
    check(world, uniform(kind, world), ADAGRAD, dedup=dedup)


@pytest.mark.parametrize("kind", list(ShardingType), ids=lambda kind: kind.value)
def test_a_rank_deduplicates_a_batch_of_repetitions_while_another_sends_all_its_ids(kind: ShardingType) -> None:
    """About 1,600 ids of 55 rows on rank 0; too few to tell on rank 1."""
    check(2, uniform(kind, 2), SGD, batch_sizes=(180, 3), dedup="auto")


MIXED: Kinds = [
    (T.ROW_WISE, [0, 1]),
    (T.COLUMN_WISE, [1, 0]),
    (T.DATA_PARALLEL, [0, 1]),
    (T.TABLE_WISE, [1]),
    (T.ROW_WISE, [1, 0]),
]
TWICE: Kinds = [  # rectangles of one table that do not touch, on one rank; columns of unlike width
    (T.COLUMN_WISE, [0, 1, 0]),
    (T.COLUMN_WISE, [0, 1, 0]),
    (T.TABLE_WISE, [0]),
    (T.DATA_PARALLEL, [0, 1]),
    (T.ROW_WISE, [0, 1, 0, 1, 0]),
]


@pytest.mark.parametrize("dedup", [False, True], ids=["all", "dedup"])
@pytest.mark.parametrize("params", [SGD, ADAGRAD, ADAM], ids=["sgd", "adagrad", "adam"])
@pytest.mark.parametrize("kinds", [MIXED, TWICE], ids=["mixed", "twice"])
def test_mixed_plans_equal_one_process(kinds: Kinds, params: dict[str, Any], dedup: bool) -> None:
    check(2, kinds, params, dedup=dedup)


@pytest.mark.parametrize("kind", [T.TABLE_WISE, T.ROW_WISE, T.DATA_PARALLEL, T.TABLE_ROW_WISE], ids=lambda k: k.value)
def test_row_wise_adagrad_equals_one_process(kind: ShardingType) -> None:
    check(2, uniform(kind, 2), ROWWISE)


@pytest.mark.parametrize("kind", [T.ROW_WISE, T.COLUMN_WISE, T.DATA_PARALLEL], ids=lambda kind: kind.value)
def test_adam_equals_one_process(kind: ShardingType) -> None:
    check(2, uniform(kind, 2), ADAM)


@pytest.mark.parametrize("dedup", [False, True], ids=["all", "dedup"])
@pytest.mark.parametrize(
    ("sizes", "kinds"),
    [
        *(((0, 4), uniform(kind, 2)) for kind in (T.TABLE_WISE, T.ROW_WISE, T.DATA_PARALLEL)),
        *((sizes, MIXED) for sizes in ((5, 2), (0, 4), (3, 0))),
    ],
    ids=["tw", "rw", "dp", "mixed-5-2", "mixed-0-4", "mixed-3-0"],
)
def test_ranks_may_bring_batches_of_different_size(sizes: tuple[int, ...], kinds: Kinds, dedup: bool) -> None:
    check(2, kinds, ADAGRAD, batch_sizes=sizes, dedup=dedup)


@pytest.mark.parametrize("dedup", [False, True], ids=["all", "dedup"])
@pytest.mark.parametrize("kinds", [uniform(T.TABLE_WISE, 1), uniform(T.COLUMN_WISE, 1), uniform(T.DATA_PARALLEL, 1)])
def test_one_rank_equals_the_plain_module(kinds: Kinds, dedup: bool) -> None:
    assert check(1, kinds, ADAGRAD, dedup=dedup) == [{}] * 3


def test_batches_without_a_single_id() -> None:
    for kinds in (uniform(T.TABLE_WISE, 2), uniform(T.ROW_WISE, 2), MIXED):
        check(2, kinds, ADAGRAD, longest=0, dedup=False)
        check(2, kinds, ADAGRAD, longest=0, dedup=True)


def test_a_step_costs_a_constant_number_of_collectives_whatever_the_plan() -> None:
    """Ids, vectors, gradients; one more with replicated tables. Never one a table or sharding type."""
    flat = [exchanges(3)] * 6
    for kind in (T.TABLE_WISE, T.ROW_WISE, T.COLUMN_WISE, T.GRID_SHARD):
        assert check(2, uniform(kind, 2), SGD) == flat, kind
    assert check(2, uniform(T.DATA_PARALLEL, 2), SGD) == [exchanges(1) | {"all_gather": 1}] * 6
    assert check(2, MIXED, SGD, dedup=True) == [count | {"all_gather": 1} for count in flat]


@st.composite
def drawn_kinds(draw: st.DrawFn, world: int) -> Kinds:
    """Any sharding of each table, over any ranks in any order; a rank may hold several pieces."""
    kinds: Kinds = []
    for _ in range(5):
        kind = draw(st.sampled_from(list(ShardingType)))
        rank = st.integers(0, world - 1)
        match kind:
            case T.TABLE_WISE:
                kinds.append((kind, [draw(rank)]))
            case T.DATA_PARALLEL:
                kinds.append((kind, list(range(world))))
            case T.GRID_SHARD:
                kinds.append((kind, draw(st.lists(st.lists(rank, min_size=1, max_size=3), min_size=1, max_size=4))))
            case _:
                kinds.append((kind, draw(st.lists(rank, min_size=1, max_size=4))))
    return kinds


@settings(max_examples=drawn(15), suppress_health_check=[HealthCheck.too_slow])
@given(
    kinds=drawn_kinds(3),
    sizes=st.tuples(*[st.integers(0, 5)] * 3).filter(any),
    params=st.sampled_from([SGD, ADAGRAD, ADAM]),
    dedup=st.booleans(),
    seed=st.integers(0, 1000),
    longest=st.integers(0, 6),
)
def test_any_plan_and_batch_equal_one_process(
    kinds: Kinds, sizes: tuple[int, ...], params: dict[str, Any], dedup: bool, seed: int, longest: int
) -> None:
    check(3, kinds, params, sizes, dedup, seed, longest)


def test_ids_of_32_bits_and_keys_in_another_order_with_more_of_them() -> None:
    configs = tables()
    ec = EmbeddingCollection(configs, seed=3)
    generator = torch.Generator().manual_seed(5)
    steps = [[draw_kjt(generator, configs, 4, 3) for _ in range(2)] for _ in range(2)]

    def turned(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        other = kjt.permute([3, 0, 5, 4, 1, 2])
        more = KeyedJaggedTensor(
            [*other.keys(), "unread"],
            torch.cat([other.values(), torch.full((8,), 10**6)]).to(torch.int32),
            lengths=torch.cat([other.lengths(), torch.full((4,), 2)]).to(torch.int32),
        )
        return more

    expected = train_plain(ec, steps, ADAGRAD)
    given_steps = [[turned(kjt) for kjt in batches] for batches in steps]
    for dedup in (False, True):
        answers = on_ranks(2, train_sharded, ec, plan_of(configs, MIXED), given_steps, ADAGRAD, dedup)
        for answer in answers:
            answer[0][:] = [
                {name: (values, lengths.long()) for name, (values, lengths) in out.items()} for out in answer[0]
            ]
        assert_equal(answers, expected)


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16], ids=lambda d: d.value)
def test_tables_of_16_bits_return_float32_as_one_process_does(data_type: DataType) -> None:
    """One step: what 16-bit weights round to differs with the order in which gradients are added up."""
    configs = tables(data_type)
    ec = EmbeddingCollection(configs, seed=3)
    generator = torch.Generator().manual_seed(5)
    steps = [[draw_kjt(generator, configs, 4, 2) for _ in range(2)]]
    answers = on_ranks(2, train_sharded, ec, plan_of(configs, MIXED), steps, SGD)
    outputs, weights = train_plain(ec, steps, SGD)
    assert all(v.dtype == torch.float32 for answer in answers for v, _ in answer[0][0].values())
    assert_equal(answers, (outputs, weights), atol=2e-2)
    assert_equal([(answer[0], {}, {}) for answer in answers], (outputs, weights), atol=0)


@pytest.mark.parametrize("kind, ranks", [(T.COLUMN_WISE, [0, 1, 0]), (T.ROW_WISE, [0, 1, 0, 1])], ids=["cw", "rw"])
def test_bags_too_may_be_cut_into_rectangles_that_lie_apart_on_one_rank(kind: ShardingType, ranks: list[int]) -> None:
    """Each rectangle's lookups go to fbgemm side by side; its CPU kernels take them for two tables otherwise."""
    table = EmbeddingBagConfig(name="a", num_embeddings=11, embedding_dim=16, feature_names=["f1", "f2"])
    ebc = EmbeddingBagCollection([table], seed=1)
    generator = torch.Generator().manual_seed(0)
    steps = [[draw_kjt(generator, [table], 4, 3) for _ in range(2)] for _ in range(2)]
    _, weights = oracle.train_plain(ebc, steps, ADAGRAD)
    for _, shards in on_ranks(2, oracle.train_sharded, ebc, {"a": cut(table, kind, ranks)}, steps, ADAGRAD):
        for name, pieces in shards.items():
            for where, piece in pieces:
                part = weights[name][where.rows.start : where.rows.stop, where.cols.start : where.cols.stop]
                torch.testing.assert_close(piece, part, atol=1e-5, rtol=1e-5)
