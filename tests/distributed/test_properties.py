"""Drawn plans, batches, optimizers and number formats: always the same function as one plain process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.distributed.kernel import EmbOptimType
from rayrec.distributed.sharding.vector_exchange import Codec
from rayrec.distributed.types import ModuleSharding, ShardingType
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from rayrec.optim import LAMB, LarsSGD, PartialRowWiseAdam, RowWiseAdagrad
from tests.distributed.oracle import cut, draw_kjt, join, targets, train_plain, train_sharded
from tests.ranks import on_ranks

WORLD = 2
KINDS = list(ShardingType)


@st.composite
def problems(draw: st.DrawFn) -> Any:
    """Tables, a plan for two ranks, and batches of drawn sizes."""
    features = [f"f{n}" for n in range(4)]
    tables, plan = [], {}
    for number in range(draw(st.integers(1, 4))):
        table = EmbeddingBagConfig(
            name=f"t{number}",
            num_embeddings=draw(st.integers(1, 12)),
            embedding_dim=draw(st.sampled_from([8, 16, 24])),
            feature_names=draw(st.lists(st.sampled_from(features), min_size=1, max_size=2, unique=True)),
            pooling=draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN])),
        )
        kind = draw(st.sampled_from(KINDS))
        ranks: Any = draw(st.permutations(range(WORLD)))
        if kind is ShardingType.TABLE_WISE:
            ranks = ranks[:1]
        if kind is ShardingType.GRID_SHARD:
            ranks = [[ranks[0]], [ranks[1]]]
        tables.append(table)
        plan[table.name] = cut(table, kind, ranks)
    sizes = draw(st.lists(st.integers(0, 5), min_size=WORLD, max_size=WORLD).filter(any))
    return tables, plan, sizes, draw(st.booleans()), draw(st.integers(0, 1 << 30))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_drawn_plans_equal_one_process(problem: Any) -> None:
    tables, plan, sizes, weighted, seed = problem
    generator = torch.Generator().manual_seed(seed)
    steps = [[draw_kjt(generator, tables, size, 3, weighted) for size in sizes] for _ in range(2)]
    ebc = EmbeddingBagCollection(tables, is_weighted=weighted, seed=seed)
    params = {"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
    assert_same(ebc, plan, steps, params, train_plain(ebc, steps, params))


def assert_same(
    ebc: EmbeddingBagCollection,
    plan: ModuleSharding,
    steps: Any,
    params: dict[str, Any],
    expected: Any,
    tol: float = 1e-5,
    dedup: bool = False,
    train: Callable[..., Any] = train_sharded,
) -> None:
    outputs, weights = expected
    answers = on_ranks(len(steps[0]), train, ebc, plan, steps, params, None, dedup)
    for step, output in enumerate(outputs):
        got = torch.cat([answer[0][step] for answer in answers])
        torch.testing.assert_close(got, output, atol=tol, rtol=tol)
    for _, shards in answers:
        for name, pieces in shards.items():
            for shard, piece in pieces:
                part = weights[name][shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop]
                torch.testing.assert_close(piece, part, atol=tol, rtol=tol)


def small_tables(data_type: DataType = DataType.FP32) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name="a", num_embeddings=9, embedding_dim=8, feature_names=["f1", "f2"], data_type=data_type
        ),
        EmbeddingBagConfig(name="b", num_embeddings=5, embedding_dim=16, feature_names=["f3"], data_type=data_type),
    ]


class TouchedRowsAdam(torch.optim.SparseAdam):
    """Torch's Adam for sparse gradients, on the rows that have one."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = param.grad.to_sparse(1)
        return super().step(closure)


OPTIMIZERS: dict[EmbOptimType, Any] = {
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: RowWiseAdagrad,
    EmbOptimType.ADAM: TouchedRowsAdam,
    EmbOptimType.PARTIAL_ROWWISE_ADAM: PartialRowWiseAdam,
    EmbOptimType.LAMB: LAMB,
    EmbOptimType.LARS_SGD: LarsSGD,
}


def train_with(make: Any, ebc: EmbeddingBagCollection, steps: Any) -> Any:
    ebc = copy.deepcopy(ebc)
    optimizer = make(list(ebc.parameters()))
    outputs = []
    for batches in steps:
        kt = ebc(join(batches))
        outputs.append(kt.values().detach())
        optimizer.zero_grad()
        targets(kt).mean().backward()
        optimizer.step()
    return outputs, {name: value.detach() for name, value in ebc.state_dict().items()}


@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL])
@pytest.mark.parametrize("rule", list(OPTIMIZERS), ids=lambda rule: rule.value)
def test_every_optimizer_is_the_same_rule_under_every_plan(rule: EmbOptimType, kind: ShardingType) -> None:
    tables = small_tables()
    ranks = [0] if kind is ShardingType.TABLE_WISE else [0, 1]
    plan = {table.name: cut(table, kind, ranks) for table in tables}
    generator = torch.Generator().manual_seed(3)
    steps = [[draw_kjt(generator, tables, size, 3) for size in (4, 3)] for _ in range(3)]
    ebc = EmbeddingBagCollection(tables, seed=2)
    eps = {} if rule is EmbOptimType.LARS_SGD else {"eps": 1e-10}
    expected = train_with(lambda params: OPTIMIZERS[rule](params, lr=0.05, **eps), ebc, steps)
    assert_same(ebc, plan, steps, {"optimizer": rule, "learning_rate": 0.05, "eps": 1e-10}, expected)


@pytest.mark.parametrize("data_type, tol", [(DataType.FP16, 2e-3), (DataType.BF16, 2e-2)])
@pytest.mark.parametrize("kind", [ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL])
def test_half_precision_tables_follow_the_unsharded_module(data_type: DataType, tol: float, kind: ShardingType) -> None:
    tables = small_tables(data_type)
    plan = {table.name: cut(table, kind, [0, 1]) for table in tables}
    generator = torch.Generator().manual_seed(4)
    steps = [[draw_kjt(generator, tables, 4, 2) for _ in range(2)] for _ in range(2)]
    ebc = EmbeddingBagCollection(tables, seed=2)
    expected = train_with(lambda params: torch.optim.SGD(params, lr=0.05), ebc, steps)
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.05}
    assert_same(ebc, plan, steps, params, expected, tol)


@pytest.mark.parametrize("forward", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("backward", [torch.float32, torch.bfloat16])
def test_vectors_may_travel_in_half_precision(forward: torch.dtype, backward: torch.dtype) -> None:
    tables = small_tables()
    plan = {table.name: cut(table, ShardingType.ROW_WISE, [0, 1]) for table in tables}
    generator = torch.Generator().manual_seed(5)
    steps = [[draw_kjt(generator, tables, 4, 2) for _ in range(2)] for _ in range(2)]
    ebc = EmbeddingBagCollection(tables, seed=2)
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.05}
    outputs, _ = train_plain(ebc, steps, params)
    answers = on_ranks(WORLD, train_sharded, ebc, plan, steps, params, Codec(forward, backward))
    for step, output in enumerate(outputs):
        got = torch.cat([answer[0][step] for answer in answers])
        torch.testing.assert_close(got, output, atol=2e-2, rtol=2e-2)
        assert not torch.equal(got, output)
