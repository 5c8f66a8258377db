"""Tables of any width: true widths in memory, state, parameters and checkpoints, and the same training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed import EmbeddingBagCollectionSharder, EmbOptimType, ShardingEnv, ShardingType
from rayrec.distributed.kernel import RULES, FusedKernel, OptimizerSpec, optimizer_formulas
from rayrec.distributed.kernel.tbe import Padding, padded
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor
from tests.distributed.oracle import cut, draw_kjt, train_plain
from tests.distributed.test_properties import assert_same
from tests.ranks import on_ranks

CPU = torch.device("cpu")
DIMS = [1, 3, 5, 10, 50]


def configs(data_type: DataType = DataType.FP32) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"t{dim}", num_embeddings=7, embedding_dim=dim, feature_names=[f"f{dim}"], data_type=data_type
        )
        for dim in DIMS
    ]


@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad"])
@pytest.mark.parametrize("kinds", ["sharded", "replicated", "mixed"])
def test_odd_widths_train_as_one_process(name: str, kinds: str) -> None:
    tables = configs()
    chosen = {
        "sharded": [ShardingType.TABLE_WISE, ShardingType.ROW_WISE] * 3,
        "replicated": [ShardingType.DATA_PARALLEL] * 5,
        "mixed": [ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE, ShardingType.TABLE_WISE] * 2,
    }[kinds]
    if name != "rowwise_adagrad" and kinds == "mixed":
        chosen[4] = ShardingType.COLUMN_WISE
    plan = {
        table.name: cut(table, kind, [1] if kind is ShardingType.TABLE_WISE else [0, 1])
        for table, kind in zip(tables, chosen, strict=False)
    }
    generator = torch.Generator().manual_seed(1)
    steps = [[draw_kjt(generator, tables, size, 3) for size in (4, 3)] for _ in range(3)]
    ebc = EmbeddingBagCollection(tables, seed=2)
    params = {"optimizer": RULES[name].kind, "learning_rate": 0.1}
    assert_same(ebc, plan, steps, params, train_plain(ebc, steps, params))


def test_parameters_and_state_have_the_true_width() -> None:
    tables = configs()
    plan = {table.name: cut(table, ShardingType.TABLE_WISE, [0]) for table in tables}
    sharder = EmbeddingBagCollectionSharder({"optimizer": RULES["adagrad"].kind})
    sharded = sharder.shard(EmbeddingBagCollection(tables), plan, ShardingEnv.from_local(1, 0), CPU)
    shapes = {name: tuple(value.shape) for name, value in sharded.state_dict().items()}
    assert shapes == {f"embedding_bags.t{dim}.weight": (7, dim) for dim in DIMS}
    for name, table in sharded.tables().items():
        assert [tuple(state.shape) for state in table.local[0].state.values()] == [(7, int(name[1:]))]
    (kernel,) = sharded.kernels()
    assert isinstance(kernel, FusedKernel)
    assert [tuple(weight.shape) for weight in kernel.weights()] == [(7, dim) for dim in DIMS]


@pytest.mark.parametrize("dim", [1, 5, 10])
@pytest.mark.parametrize("name", ["sgd", "adagrad", "rowwise_adagrad", "adam", "lamb", "lars_sgd"])
@pytest.mark.parametrize("mode", ["l2", "decouple", None])
def test_padding_changes_no_rule(name: str, dim: int, mode: Any) -> None:
    """A table held wider, as on a GPU, with the gradients, rate and decay that its kernel gets there."""
    rule, rows = RULES[name], torch.arange(4)
    if mode not in (*rule.decay, None):
        pytest.skip("the rule has no such decay")
    decay = 0.3 if mode or not rule.decay else 0.0
    spec = OptimizerSpec(optimizer=rule.kind, learning_rate=0.1, weight_decay=decay, weight_decay_mode=mode)
    padding = Padding([dim], CPU, per_row=any(rule.rowwise.values()))
    held = OptimizerSpec(
        optimizer=rule.kind,
        learning_rate=0.1 / padding.scale,
        weight_decay=decay * padding.scale,
        weight_decay_mode=mode,
    )
    generator = torch.Generator().manual_seed(dim)
    true = torch.rand(4, dim, generator=generator)
    wide = torch.zeros(4, padded(dim))
    wide[:, :dim] = true
    state, wide_state = (optimizer_formulas.make_state(s, 4, w.shape[1], CPU) for s, w in ((spec, true), (held, wide)))
    for count in (1, 2, 3):
        bags = wide.clone().requires_grad_()
        out = padding.cut(bags)
        assert torch.equal(out, wide[:, :dim])
        grad = torch.randn(4, dim, generator=generator)
        out.backward(grad)
        assert bags.grad is not None
        optimizer_formulas.apply(
            true,
            optimizer_formulas.Step(rows, true.clone(), grad, state, spec, spec.learning_rate, count),
            optimizer_formulas.formula_of(spec),
        )
        optimizer_formulas.apply(
            wide,
            optimizer_formulas.Step(rows, wide.clone(), bags.grad, wide_state, held, held.learning_rate, count),
            optimizer_formulas.formula_of(held),
        )
        torch.testing.assert_close(wide[:, :dim], true)
        assert not wide[:, dim:].any()
    for key, per_row in rule.rowwise.items():
        torch.testing.assert_close(wide_state[key] if per_row else wide_state[key][:, :dim], state[key])


def state_of_an_odd_width(group: dist.ProcessGroup, kind: ShardingType) -> tuple[bool, bool]:
    """Whether a second collection that loads the state of the first one, optimizer too, goes on as it does."""
    table = EmbeddingBagConfig(name="t", num_embeddings=20, embedding_dim=13, feature_names=["f"])
    plan = {"t": cut(table, kind, [0, 1])}
    sharder = EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1})
    env = ShardingEnv.from_process_group(group)
    one, other = (
        sharder.shard(EmbeddingBagCollection([table], seed=seed), plan, env, torch.device("cpu")) for seed in (1, 2)
    )
    kjt = KeyedJaggedTensor(["f"], torch.tensor([3, 7, 19, 3]), lengths=torch.tensor([2, 2]))
    one(kjt).wait().values().square().sum().backward()
    other.load_state_dict(one.state_dict())
    other.fused_optimizer.load_state_dict(one.fused_optimizer.state_dict())
    results = []
    for _ in range(2):
        first, second = one(kjt).wait().values(), other(kjt).wait().values()
        results.append(torch.equal(first, second))
        first.square().sum().backward()
        second.square().sum().backward()
    return results[0], results[1]


@pytest.mark.parametrize("kind", [ShardingType.ROW_WISE, ShardingType.COLUMN_WISE])
def test_a_width_that_is_padded_has_a_state_dict_on_many_ranks(kind: ShardingType) -> None:
    assert on_ranks(2, state_of_an_odd_width, kind) == [(True, True)] * 2
