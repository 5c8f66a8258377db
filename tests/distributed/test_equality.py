"""Any plan computes the same function: forward and every weight after several steps equal one plain process."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch

from rayrec.distributed import ModuleSharding, ParameterSharding, Shard, ShardingType, Span
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from tests.distributed.oracle import ADAGRAD, ROWWISE, SGD, cut, draw_kjt, join, train_plain, train_sharded
from tests.ranks import on_ranks

T = ShardingType


def tables(pooling: PoolingType = PoolingType.SUM) -> list[EmbeddingBagConfig]:
    """Shared features, a table with two features, few rows, a single row, unlike widths."""
    return [
        EmbeddingBagConfig(name="a", num_embeddings=11, embedding_dim=16, feature_names=["f1"], pooling=pooling),
        EmbeddingBagConfig(name="b", num_embeddings=23, embedding_dim=16, feature_names=["f2", "f3"], pooling=pooling),
        EmbeddingBagConfig(name="c", num_embeddings=3, embedding_dim=8, feature_names=["f4"], pooling=pooling),
        EmbeddingBagConfig(name="d", num_embeddings=1, embedding_dim=8, feature_names=["f5"]),
        EmbeddingBagConfig(
            name="e", num_embeddings=17, embedding_dim=32, feature_names=["f1", "f6"], pooling=PoolingType.MEAN
        ),
    ]


def plan_of(configs: list[EmbeddingBagConfig], kinds: list[tuple[ShardingType, Any]]) -> ModuleSharding:
    return {table.name: cut(table, kind, ranks) for table, (kind, ranks) in zip(configs, kinds, strict=True)}


def uniform(kind: ShardingType, world: int) -> list[tuple[ShardingType, Any]]:
    everyone = list(range(world))
    hosts = [everyone[: world // 2], everyone[world // 2 :]]
    match kind:
        case T.TABLE_WISE:
            return [(kind, [number % world]) for number in range(5)]
        case T.COLUMN_WISE | T.TABLE_COLUMN_WISE:
            return [(kind, [0, 1] if number in (2, 3) else everyone) for number in range(5)]
        case T.TABLE_ROW_WISE:
            return [(kind, hosts[number % 2]) for number in range(5)]
        case T.GRID_SHARD:
            return [(kind, hosts)] * 5
    return [(kind, everyone)] * 5


def check(
    world: int,
    kinds: list[tuple[ShardingType, Any]],
    fused_params: dict[str, Any],
    pooling: PoolingType = PoolingType.SUM,
    weighted: bool = False,
    batch_sizes: tuple[int, ...] | None = None,
    dedup: bool = False,
    train: Callable[..., Any] = train_sharded,
    configs: list[EmbeddingBagConfig] | None = None,
    plan: ModuleSharding | None = None,
) -> None:
    configs = configs or tables(pooling)
    plan = plan or plan_of(configs, kinds)
    ebc = EmbeddingBagCollection(configs, is_weighted=weighted, seed=3)
    generator = torch.Generator().manual_seed(7)
    sizes = batch_sizes or (6,) * world
    steps = [[draw_kjt(generator, configs, size, 3, weighted) for size in sizes] for _ in range(3)]
    outputs, weights = train_plain(ebc, steps, fused_params)
    answers = on_ranks(world, train, ebc, plan, steps, fused_params, None, dedup)
    for step, output in enumerate(outputs):
        torch.testing.assert_close(torch.cat([answer[0][step] for answer in answers]), output, atol=1e-5, rtol=1e-5)
    for _, shards in answers:
        for name, pieces in shards.items():
            for shard, piece in pieces:
                expected = weights[name][shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop]
                torch.testing.assert_close(piece, expected, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("kind", list(ShardingType), ids=lambda kind: kind.value)
def test_every_sharding_type_equals_one_process(kind: ShardingType, world: int) -> None:
    check(world, uniform(kind, world), ADAGRAD)


MIXED = [
    (T.ROW_WISE, [0, 1]),
    (T.COLUMN_WISE, [1, 0]),
    (T.DATA_PARALLEL, [0, 1]),
    (T.TABLE_WISE, [1]),
    (T.ROW_WISE, [1, 0]),
]


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("params", [SGD, ADAGRAD], ids=["sgd", "adagrad"])
def test_a_mixed_plan_equals_one_process(pooling: PoolingType, weighted: bool, params: dict[str, Any]) -> None:
    check(2, MIXED, params, pooling, weighted)


@pytest.mark.parametrize("kind", [T.TABLE_WISE, T.ROW_WISE, T.DATA_PARALLEL, T.TABLE_ROW_WISE], ids=lambda k: k.value)
def test_row_wise_adagrad_equals_one_process(kind: ShardingType) -> None:
    check(2, uniform(kind, 2), ROWWISE)


@pytest.mark.parametrize("sizes", [(5, 2), (0, 4), (3, 0)])
@pytest.mark.parametrize(
    "kinds", [uniform(T.ROW_WISE, 2), uniform(T.DATA_PARALLEL, 2), MIXED], ids=["rw", "dp", "mixed"]
)
def test_ranks_may_bring_batches_of_different_size(sizes: tuple[int, ...], kinds: list[Any]) -> None:
    check(2, kinds, ADAGRAD, batch_sizes=sizes)


def test_strips_that_overlap_in_part_after_they_were_joined() -> None:
    """Both column halves of the first rows lie on rank 0 and are joined; below, each half is cut on its own."""
    table = EmbeddingBagConfig(name="t", num_embeddings=12, embedding_dim=16, feature_names=["f1", "f2"])
    left, right = Span(0, 8), Span(8, 16)
    shards = [
        Shard(table="t", rows=Span(0, 6), cols=left, rank=0),
        Shard(table="t", rows=Span(6, 12), cols=left, rank=1),
        Shard(table="t", rows=Span(0, 6), cols=right, rank=0),
        Shard(table="t", rows=Span(6, 9), cols=right, rank=1),
        Shard(table="t", rows=Span(9, 12), cols=right, rank=0),
    ]
    plan = {"t": ParameterSharding(sharding_type=T.GRID_SHARD.value, compute_kernel="fused", shards=tuple(shards))}
    check(2, [], ADAGRAD, configs=[table], plan=plan)


def test_replicas_of_one_width_in_two_number_formats() -> None:
    """Each keeps its own format: numbers that fp16 has not stay in the fp32 table."""
    configs = [
        EmbeddingBagConfig(
            name=kind.value, num_embeddings=9, embedding_dim=8, feature_names=[kind.value], data_type=kind
        )
        for kind in (DataType.FP16, DataType.FP32)
    ]
    ebc = EmbeddingBagCollection(configs, seed=3)
    generator = torch.Generator().manual_seed(7)
    steps = [[draw_kjt(generator, configs, 5, 3) for _ in range(2)] for _ in range(2)]
    outputs, weights = train_plain(ebc, steps, SGD)
    plan = {table.name: cut(table, T.DATA_PARALLEL, [0, 1]) for table in configs}
    for rank, (got, shards) in enumerate(on_ranks(2, train_sharded, ebc, plan, steps, SGD)):
        mine = outputs[0][5 * rank : 5 * rank + 5]
        torch.testing.assert_close(got[0], mine, atol=1e-6, rtol=1e-6)
        for name, tol in (("FP16", 2e-3), ("FP32", 1e-5)):
            ((_, replica),) = shards[f"embedding_bags.{name}.weight"]
            expected = weights[f"embedding_bags.{name}.weight"]
            assert replica.dtype == expected.dtype
            torch.testing.assert_close(replica, expected, atol=tol, rtol=tol)


def test_join_is_the_concatenated_batch() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = [draw_kjt(generator, tables(), size, 2) for size in (2, 3)]
    both = join(batches)
    assert both.stride() == 5
    assert both["f2"].to_dense()[2].tolist() == batches[1]["f2"].to_dense()[0].tolist()


@pytest.mark.parametrize("edges", [(0, 0, 1), (0, 1, 1), (0, 0.5, 0.5)])
@pytest.mark.parametrize("world", [2, 3])
def test_shards_without_rows_hold_nothing(edges: tuple[float, ...], world: int) -> None:
    """TorchRec's row-wise plans have such shards; an empty one may be the first, the last or in the middle."""
    plan: ModuleSharding = {}
    for table in tables():
        starts = [round(edge * table.num_embeddings) for edge in edges[:world]] + [table.num_embeddings]
        rows = [Span(low, high) for low, high in pairwise(starts)]
        rows += [Span(table.num_embeddings, table.num_embeddings)] * (world - len(rows))
        shards = [
            Shard(table=table.name, rows=span, cols=Span(0, table.embedding_dim), rank=rank)
            for rank, span in enumerate(rows)
        ]
        plan[table.name] = ParameterSharding(sharding_type="row_wise", compute_kernel="fused", shards=tuple(shards))
    check(world, [], ADAGRAD, plan=plan)
