"""Drawn plans, batches, optimizers and number formats: always the same function as one plain process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rayrec.distributed import (
    BF16,
    FP16,
    FP32,
    Codec,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ModuleSharding,
    NumberFormat,
    ShardingEnv,
    ShardingType,
    fp8_rows,
    int8_rows,
)
from rayrec.distributed.kernel import RULES, DecayMode
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.optim import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB, RowWiseAdagrad
from tests.distributed.oracle import ADAGRAD, cut, draw_kjt, join, targets, train_plain, train_sharded
from tests.ranks import on_ranks

WORLD = 2
KINDS = list(ShardingType)
CUT_BY_COLUMNS = (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE, ShardingType.GRID_SHARD)


@st.composite
def problems(draw: st.DrawFn) -> Any:
    """Tables, a plan for two ranks, and batches of drawn sizes."""
    features = [f"f{n}" for n in range(4)]
    tables, plan = [], {}
    for number in range(draw(st.integers(1, 4))):
        kind = draw(st.sampled_from(KINDS))
        table = EmbeddingBagConfig(
            name=f"t{number}",
            num_embeddings=draw(st.integers(1, 12)),
            embedding_dim=draw(st.sampled_from([5, 10, 16, 24] if kind in CUT_BY_COLUMNS else [1, 3, 5, 8, 10, 24])),
            feature_names=draw(st.lists(st.sampled_from(features), min_size=1, max_size=2, unique=True)),
            pooling=draw(st.sampled_from([PoolingType.SUM, PoolingType.MEAN])),
        )
        ranks: Any = draw(st.permutations(range(WORLD)))
        if kind is ShardingType.TABLE_WISE:
            ranks = ranks[:1]
        if kind is ShardingType.GRID_SHARD:
            ranks = [[ranks[0]], [ranks[1]]]
        tables.append(table)
        plan[table.name] = cut(table, kind, ranks)
    sizes = draw(st.lists(st.integers(0, 5), min_size=WORLD, max_size=WORLD).filter(any))
    return tables, plan, sizes, draw(st.booleans()), draw(st.integers(0, 1 << 30))


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(problems())
def test_drawn_plans_equal_one_process(problem: Any) -> None:
    tables, plan, sizes, weighted, seed = problem
    generator = torch.Generator().manual_seed(seed)
    steps = [[draw_kjt(generator, tables, size, 3, weighted) for size in sizes] for _ in range(2)]
    ebc = EmbeddingBagCollection(tables, is_weighted=weighted, seed=seed)
    assert_same(ebc, plan, steps, ADAGRAD, train_plain(ebc, steps, ADAGRAD))


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


class TouchedRows:
    """A torch optimizer whose rows without a gradient rest, and decay that it does not know as L2.

    Args:
        inner: torch's or rayrec.optim's.
        decouple: times lr and weight, taken off the touched rows.
    """

    def __init__(self, inner: torch.optim.Optimizer, decouple: float = 0.0) -> None:
        self._inner, self._decouple = inner, decouple
        self.zero_grad = inner.zero_grad

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self._inner.param_groups
        before = []
        for param in group["params"]:
            held = {
                name: value.clone() for name, value in self._inner.state[param].items() if self._by_row(value, param)
            }
            before.append((param.clone(), held, (param.grad != 0).any(1)))
        self._inner.step()
        for param, (weight, held, touched) in zip(group["params"], before, strict=True):
            param[touched] -= group["lr"] * self._decouple * weight[touched]
            param[~touched] = weight[~touched]
            for name, value in self._inner.state[param].items():
                if self._by_row(value, param):
                    value[~touched] = held[name][~touched] if name in held else 0.0

    @staticmethod
    def _by_row(value: Any, param: torch.Tensor) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == len(param)


@st.composite
def optimizers(draw: st.DrawFn) -> tuple[dict[str, Any], Callable[[Any], Any]]:
    """`fused_params` with drawn options, and what makes the plain twin."""
    name = draw(st.sampled_from(sorted(RULES)))
    rule, lr = RULES[name], 0.05
    options: dict[str, Any] = {"weight_decay": draw(st.sampled_from([0.0, 0.3]))}
    values = {
        "eps": [1e-8, 1e-3],
        "beta1": [0.9, 0.6],
        "beta2": [0.999, 0.9],
        "momentum": [0.9, 0.0],
        "eta": [0.1, 1.0],
    }
    for setting in sorted(rule.reads):
        options[setting] = draw(st.sampled_from(values[setting]))
    mode = draw(st.sampled_from([None, *rule.decay])) if options["weight_decay"] else None
    decouple = rule.decay and (mode or rule.decay[0]) is DecayMode.DECOUPLE
    plain: dict[str, Any] = {"lr": lr, **options}
    if "beta1" in rule.reads:
        plain["betas"] = (plain.pop("beta1"), plain.pop("beta2"))
    rest = 0.0
    if decouple and name != "partial_rowwise_adam":
        rest, plain["weight_decay"] = plain["weight_decay"], 0.0
    twins: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "adam": torch.optim.Adam}
    twins |= {"rowwise_adagrad": RowWiseAdagrad, "partial_rowwise_adam": PartialRowWiseAdam}
    make = (twins | {"lamb": LAMB, "partial_rowwise_lamb": PartialRowWiseLAMB, "lars_sgd": LarsSGD})[name]
    if name == "partial_rowwise_adam" and not decouple:  # its plain twin knows no L2
        mode = None
    fused = {"optimizer": rule.kind, "learning_rate": lr, **options}
    return fused | ({"weight_decay_mode": mode} if mode else {}), lambda params: TouchedRows(
        make(params, **plain), rest
    )


@settings(max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    optimizers(),
    st.sampled_from([ShardingType.TABLE_WISE, ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL]),
    st.integers(0, 1 << 30),
)
def test_every_optimizer_and_option_means_the_same_under_every_plan(
    optimizer: tuple[dict[str, Any], Callable[[Any], Any]], kind: ShardingType, seed: int
) -> None:
    fused, make = optimizer
    tables = small_tables()
    ranks = [0] if kind is ShardingType.TABLE_WISE else [0, 1]
    plan = {table.name: cut(table, kind, ranks) for table in tables}
    generator = torch.Generator().manual_seed(seed)
    steps = [[draw_kjt(generator, tables, size, 3) for size in (4, 3)] for _ in range(3)]
    ebc = EmbeddingBagCollection(tables, seed=2)
    assert_same(ebc, plan, steps, fused, train_with(make, ebc, steps), tol=2e-5)


@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL], ids=lambda kind: kind.value)
@pytest.mark.parametrize(
    "settings_, expected",
    [
        ({"optimizer": EmbOptimType.EXACT_SGD}, 1 - 0.1 * (1 + 0.5)),
        ({"optimizer": EmbOptimType.EXACT_SGD, "weight_decay_mode": "decouple"}, 1 - 0.1 - 0.1 * 0.5),
        ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 0.0}, 1 - 0.1),
        ({"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "eps": 0.0, "weight_decay_mode": "decouple"}, 1 - 0.1 * 1.5),
        ({"optimizer": EmbOptimType.ADAM, "eps": 0.0}, 1 - 0.1 * 1.5),
        ({"optimizer": EmbOptimType.ADAM, "eps": 0.0, "weight_decay_mode": "l2"}, 1 - 0.1),
    ],
    ids=["sgd", "sgd-decouple", "rowwise", "rowwise-decouple", "adam", "adam-l2"],
)
def test_weight_decay_by_hand(kind: ShardingType, settings_: dict[str, Any], expected: float) -> None:
    """Weight 1, gradient 1, learning rate 0.1, decay 0.5: one step."""
    fused = {"learning_rate": 0.1, "weight_decay": 0.5, **settings_}
    assert all(weight == pytest.approx(expected) for weight in on_ranks(WORLD, one_step, kind, fused) if weight)


def one_step(group: Any, kind: ShardingType, fused: dict[str, Any]) -> float:
    table = EmbeddingBagConfig(name="t", num_embeddings=2, embedding_dim=4, feature_names=["f"])
    ebc = EmbeddingBagCollection([table])
    torch.nn.init.ones_(ebc.embedding_bags["t"].weight)
    plan = {"t": cut(table, kind, [0] if kind is ShardingType.TABLE_WISE else [0, 1])}
    sharder = EmbeddingBagCollectionSharder(fused)
    sharded = sharder.shard(ebc, plan, ShardingEnv.from_process_group(group), torch.device("cpu"))
    kjt = KeyedJaggedTensor(["f"], torch.tensor([1]), lengths=torch.tensor([1]))
    sharded(kjt).wait().values().sum().backward()
    local = sharded.tables()["t"].local
    return float(local[0].weight[1, 0]) if local else 0.0


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


@pytest.mark.parametrize("forward", [FP16, BF16, int8_rows(), fp8_rows()], ids=lambda kind: kind.name)
@pytest.mark.parametrize("backward", [FP32, BF16], ids=lambda kind: kind.name)
def test_vectors_may_travel_in_fewer_bits(forward: NumberFormat, backward: NumberFormat) -> None:
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
        torch.testing.assert_close(got, output, atol=5e-2, rtol=5e-2)
        assert not torch.equal(got, output)


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("kernel", ["fused", "dense"])
@pytest.mark.parametrize("kind", [ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL], ids=lambda kind: kind.value)
def test_tables_of_16_bits_are_pooled_in_float32(kind: ShardingType, kernel: str, data_type: DataType) -> None:
    """A large vector and a small one, whose sum 16 bits do not tell from the large one."""
    answers = on_ranks(WORLD, pooled_of_16_bits, kind, kernel, data_type)
    for pooled, gradient in answers:
        assert pooled == [2048.0 + 1.0] * 4
        assert gradient == [-1.0] * 4


def pooled_of_16_bits(
    group: Any, kind: ShardingType, kernel: str, data_type: DataType
) -> tuple[list[float], list[float]]:
    table = EmbeddingBagConfig(name="t", num_embeddings=2, embedding_dim=4, feature_names=["f"], data_type=data_type)
    ebc = EmbeddingBagCollection([table])
    with torch.no_grad():
        ebc.embedding_bags["t"].weight.copy_(torch.tensor([[2048.0], [1.0]]).expand(2, 4))
    plan = {"t": cut(table, kind, [0, 1], kernel)}
    fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1.0}
    sharder = EmbeddingBagCollectionSharder(fused)
    sharded = sharder.shard(ebc, plan, ShardingEnv.from_process_group(group), torch.device("cpu"))
    kjt = KeyedJaggedTensor(["f"], torch.tensor([0, 1]), lengths=torch.tensor([2]))
    out = sharded(kjt).wait().values()
    out.backward(torch.full_like(out, -1.0))
    shard = sharded.tables()["t"].local[-1]
    grad = shard.parameter.grad
    moved = grad[-1] if grad is not None else torch.ones(4) - shard.weight[-1].float()
    return out[0].tolist(), moved.tolist() if shard.shard.rows.stop == 2 else [-1.0] * 4


def test_stochastic_rounding_keeps_small_updates_alike_on_every_rank() -> None:
    """Steps of 1/16 of what bfloat16 can tell at 1: lost when rounded to the nearest, kept on average at random."""
    table = EmbeddingBagConfig(
        name="t", num_embeddings=64, embedding_dim=8, feature_names=["f"], data_type=DataType.BF16
    )
    for rounding, expected in ((False, 1.0), (True, 1.0 - 64 / 16 / 256)):
        fused = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 1 / 16 / 256, "stochastic_rounding": rounding}
        for kind in (ShardingType.DATA_PARALLEL, ShardingType.ROW_WISE):
            weights = on_ranks(WORLD, small_updates, table, kind, fused)
            assert torch.cat(weights).float().mean() == pytest.approx(expected, abs=1e-3)
            assert kind is not ShardingType.DATA_PARALLEL or torch.equal(*weights)


def small_updates(group: Any, table: EmbeddingBagConfig, kind: ShardingType, fused: dict[str, Any]) -> torch.Tensor:
    ebc = EmbeddingBagCollection([table])
    torch.nn.init.ones_(ebc.embedding_bags["t"].weight)
    sharder = EmbeddingBagCollectionSharder(fused)
    plan = {"t": cut(table, kind, [0, 1])}
    sharded = sharder.shard(ebc, plan, ShardingEnv.from_process_group(group), torch.device("cpu"))
    kjt = KeyedJaggedTensor(["f"], torch.arange(64), lengths=torch.tensor([64]))
    for _ in range(64):
        sharded(kjt).wait().values().sum().backward()
    return sharded.tables()["t"].local[0].weight.clone()
