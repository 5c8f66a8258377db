"""Tables with a dense kernel: parameters with gradients, for any torch optimizer, under any plan as in one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingCollectionSharder,
    ModuleSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
    comm,
)
from rayrec.modules import (
    DataType,
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    PoolingType,
)
from rayrec.optim import (
    GradientClipping,
    GradientClippingOptimizer,
    KeyedOptimizerWrapper,
    apply_optimizer_in_backward,
    in_backward_optimizer_filter,
)
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.optim import PartialRowWiseAdam
from tests.device import DEVICE, exchanges
from tests.distributed import embedding_oracle, oracle
from tests.distributed.oracle import ADAGRAD, cut, draw_kjt, join, targets
from tests.ranks import on_ranks

T = ShardingType
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.05, eps=1e-4),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1, eps=1e-4),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.01, eps=1e-3, weight_decay=0.01),
    "row-wise adam": lambda params: PartialRowWiseAdam(params, lr=0.05, eps=1e-4),
}


def tables(
    pooling: PoolingType = PoolingType.SUM, data_type: DataType = DataType.FP32, dims: tuple[int, int] = (16, 8)
) -> list[EmbeddingBagConfig]:
    """A table of two features, a shared feature, fewer rows than ranks."""
    sizes = {"a": (11, dims[0], ["f1", "f2"]), "b": (3, dims[1], ["f3"]), "c": (17, dims[0], ["f1"])}
    return [
        EmbeddingBagConfig(
            name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, pooling=pooling,
            data_type=data_type,
        )
        for name, (rows, dim, features) in sizes.items()
    ]  # fmt: skip


def ranks_of(kind: ShardingType, world: int, number: int = 0) -> Any:
    everyone = list(range(world))
    hosts = [everyone[: world // 2], everyone[world // 2 :]]
    match kind:
        case T.TABLE_WISE:
            return [number % world]
        case T.COLUMN_WISE | T.TABLE_COLUMN_WISE:
            return everyone[:2]
        case T.TABLE_ROW_WISE:
            return hosts[number % 2]
        case T.GRID_SHARD:
            return hosts
    return everyone


def plan_of(kinds: list[ShardingType], world: int, kernels: str = "ddd") -> ModuleSharding:
    """Kernels by letter: d for dense, f for fused."""
    names = {"d": "dense", "f": "fused"}
    return {
        table.name: cut(table, kind, ranks_of(kind, world, number), names[kernel])
        for number, (table, kind, kernel) in enumerate(zip(tables(), kinds, kernels, strict=True))
    }


def check(
    world: int,
    plan: ModuleSharding,
    make: Callable[[Any], torch.optim.Optimizer],
    pooling: PoolingType = PoolingType.SUM,
    weighted: bool = False,
    sizes: tuple[int, ...] | None = None,
    dedup: bool = False,
    data_type: DataType = DataType.FP32,
    tol: float = 1e-5,
    num_steps: int = 3,
    local_world_size: int | None = None,
) -> None:
    configs = tables(pooling, data_type)
    generator = torch.Generator().manual_seed(7)
    steps = [
        [draw_kjt(generator, configs, size, 3, weighted) for size in sizes or (5,) * world] for _ in range(num_steps)
    ]
    ebc = EmbeddingBagCollection(configs, is_weighted=weighted, seed=3)
    outputs, weights = oracle.train_plain(ebc, steps, ADAGRAD, make)
    more = (None, dedup, make, local_world_size)
    answers = on_ranks(world, oracle.train_sharded, ebc, plan, steps, ADAGRAD, *more)
    for step, output in enumerate(outputs):
        torch.testing.assert_close(torch.cat([answer[0][step] for answer in answers]), output, atol=tol, rtol=tol)
    held = 0
    for _, shards in answers:
        for name, pieces in shards.items():
            for shard, piece in pieces:
                part = weights[name][shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop]
                torch.testing.assert_close(piece, part, atol=tol, rtol=tol, msg=lambda m, n=name: f"{n}: {m}")
                held += piece.numel()
    assert held >= sum(weight.numel() for weight in weights.values())


@pytest.mark.parametrize(
    ("kind", "name", "world"),
    [
        *((kind, name, 4) for kind in T for name in ("adagrad", "rmsprop")),
        *((kind, name, 2) for kind in (T.ROW_WISE, T.DATA_PARALLEL) for name in OPTIMIZERS),
    ],
)
def test_every_sharding_type_and_optimizer_equals_one_process(kind: ShardingType, name: str, world: int) -> None:
    check(world, plan_of([kind] * 3, world), OPTIMIZERS[name])


MIXED = [T.ROW_WISE, T.COLUMN_WISE, T.DATA_PARALLEL]


@pytest.mark.parametrize("dedup", [False, True], ids=["all", "dedup"])
@pytest.mark.parametrize("weighted", [False, True], ids=["", "weighted"])
@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_pooling_weights_and_dedup(pooling: PoolingType, weighted: bool, dedup: bool) -> None:
    check(2, plan_of(MIXED, 2), OPTIMIZERS["adam"], pooling, weighted, dedup=dedup)


@pytest.mark.parametrize("kind", [T.ROW_WISE, T.TABLE_ROW_WISE, T.GRID_SHARD], ids=lambda kind: kind.value)
def test_hosts_that_add_up_their_row_partials(kind: ShardingType) -> None:
    check(4, plan_of([kind] * 3, 4), OPTIMIZERS["adam"], local_world_size=2)


@pytest.mark.parametrize("kinds", [MIXED, [T.DATA_PARALLEL] * 3, [T.TABLE_WISE] * 3], ids=["mixed", "dp", "tw"])
@pytest.mark.parametrize("sizes", [(5, 0), (0, 3)])
def test_a_rank_without_examples_moves_its_shards_too(kinds: list[ShardingType], sizes: tuple[int, ...]) -> None:
    check(2, plan_of(kinds, 2), OPTIMIZERS["adam"], sizes=sizes)


def test_batches_without_a_single_id_leave_gradients_of_zero() -> None:
    """A gradient of zero, not none: an optimizer with momentum goes on, as in one process."""
    configs = tables()
    generator = torch.Generator().manual_seed(1)
    steps = [[draw_kjt(generator, configs, 4, longest) for _ in range(2)] for longest in (3, 0, 0)]
    ebc = EmbeddingBagCollection(configs, seed=3)
    make = OPTIMIZERS["adam"]
    _, weights = oracle.train_plain(ebc, steps, ADAGRAD, make)
    for _, shards in on_ranks(2, oracle.train_sharded, ebc, plan_of(MIXED, 2), steps, ADAGRAD, None, False, make):
        for name, pieces in shards.items():
            for shard, piece in pieces:
                part = weights[name][shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop]
                torch.testing.assert_close(piece, part, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("data_type, tol", [(DataType.FP16, 2e-3), (DataType.BF16, 2e-2)])
@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_half_precision_tables(name: str, data_type: DataType, tol: float) -> None:
    check(2, plan_of(MIXED, 2), OPTIMIZERS[name], data_type=data_type, tol=tol, num_steps=2)


@st.composite
def plans(draw: st.DrawFn) -> ModuleSharding:
    kinds = [draw(st.sampled_from(list(T))) for _ in range(3)]
    return plan_of(kinds, 2, draw(st.text("df", min_size=3, max_size=3)))


@settings(max_examples=15, suppress_health_check=[HealthCheck.too_slow])
@given(plans(), st.booleans(), st.booleans(), st.tuples(st.integers(0, 5), st.integers(0, 5)).filter(any))
def test_fused_tables_beside_dense_ones(
    plan: ModuleSharding, weighted: bool, dedup: bool, sizes: tuple[int, int]
) -> None:
    """Under Adagrad, which is the same rule either way."""
    check(
        2, plan, lambda params: torch.optim.Adagrad(params, lr=0.1, eps=0.01), PoolingType.MEAN, weighted, sizes, dedup
    )


@pytest.mark.parametrize("dedup", [False, True], ids=["all", "dedup"])
@pytest.mark.parametrize(
    ("kinds", "name"),
    [*(([kind] * 3, "adagrad") for kind in T), *((MIXED, name) for name in ("sgd", "adam", "adagrad"))],
    ids=[*(kind.value for kind in T), "mixed-sgd", "mixed-adam", "mixed-adagrad"],
)
def test_vectors_of_single_ids(kinds: list[ShardingType], name: str, dedup: bool) -> None:
    configs = [
        EmbeddingConfig(name=t.name, num_embeddings=t.num_embeddings, embedding_dim=8, feature_names=t.feature_names)
        for t in tables()
    ]
    plan = {
        table.name: cut(table, kind, ranks_of(kind, 2, number), "dense")
        for number, (table, kind) in enumerate(zip(configs, kinds, strict=True))
    }
    generator = torch.Generator().manual_seed(7)
    steps = [[draw_kjt(generator, configs, 5, 3) for _ in range(2)] for _ in range(3)]
    ec = EmbeddingCollection(configs, seed=3)
    make = OPTIMIZERS[name]
    answers = on_ranks(2, embedding_oracle.train_sharded, ec, plan, steps, ADAGRAD, dedup, make)
    embedding_oracle.assert_equal(answers, embedding_oracle.train_plain(ec, steps, ADAGRAD, make))


class Scores(nn.Module):
    """Both kinds of collection, and layers in DDP."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = EmbeddingBagCollection(tables(), seed=1)
        thing = EmbeddingConfig(name="thing", num_embeddings=9, embedding_dim=8, feature_names=["f3"])
        self.ec = EmbeddingCollection([thing], seed=2)
        self.layer, self.head = nn.Linear(56, 4), nn.Linear(8, 1)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        """The sum over examples."""
        bags = torch.tanh(self.layer(self.ebc(kjt).values()))
        return bags.square().sum() + self.head(self.ec(kjt)["f3"].values()).square().sum()


def shard_scores(group: dist.ProcessGroup | None, kernels: str = "ddf") -> Any:
    world = group.size() if group else 1
    torch.manual_seed(5)
    model = Scores()
    bags = plan_of([T.ROW_WISE, T.TABLE_WISE, T.DATA_PARALLEL], world, kernels)
    ids = {"thing": cut(model.ec.embedding_configs()[0], T.TABLE_WISE, [0], "dense")}
    return DistributedModelParallel(
        model,
        env=ShardingEnv.from_process_group(group) if group else ShardingEnv.from_local(1, 0),
        device=DEVICE,
        plan=ShardingPlan({"ebc": bags, "ec": ids}),
        sharders=[EmbeddingBagCollectionSharder(ADAGRAD), EmbeddingCollectionSharder(ADAGRAD)],
    )


def clipped(params: dict[str, nn.Parameter], norm_type: float) -> GradientClippingOptimizer:
    adam = KeyedOptimizerWrapper(params, OPTIMIZERS["adam"])
    return GradientClippingOptimizer(adam, GradientClipping.NORM, max_gradient=0.05, norm_type=norm_type)


def batches(world: int) -> list[list[KeyedJaggedTensor]]:
    generator = torch.Generator().manual_seed(2)
    return [[draw_kjt(generator, tables(), 4, 3) for _ in range(world)] for _ in range(3)]


def train_scores(group: dist.ProcessGroup, norm_type: float) -> Any:
    dmp = shard_scores(group)
    optimizer = clipped(dict(in_backward_optimizer_filter(dmp.named_parameters())), norm_type)
    counts = []
    for parts in batches(group.size()):
        optimizer.zero_grad()
        (dmp(parts[group.rank()]) / 4).backward()
        with comm.count_collectives() as counter:
            optimizer.step()
        counts.append(dict(counter))
    shards = {name: [(i.shard, i.weight.clone()) for i in table.local] for name, table in dmp.tables().items()}
    return shards, {name: p.detach().clone() for name, p in dmp.other_parameters().items()}, counts


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_a_model_whose_gradients_are_clipped_over_all_ranks(norm_type: float) -> None:
    """Dense tables and layers under one clipped Adam, a fused table beside them; one more collective a step."""
    torch.manual_seed(5)
    model = Scores()
    fused = model.ebc.embedding_bags.get_parameter("c.weight")
    dense = clipped({name: p for name, p in model.named_parameters() if p is not fused}, norm_type)
    sparse = torch.optim.Adagrad([fused], lr=0.1, eps=0.01)
    for parts in batches(2):
        dense.zero_grad()
        sparse.zero_grad()
        (model(join(parts)) / 8).backward()
        dense.step()
        sparse.step()
    expected = model.state_dict()
    for shards, others, counts in on_ranks(2, train_scores, norm_type):
        assert counts == [{"all_gather": 1}] * 3
        assert set(others) == {"layer.weight", "layer.bias", "head.weight", "head.bias"}
        for name, value in others.items():
            torch.testing.assert_close(value, expected[name], atol=1e-5, rtol=1e-4)
        for name, pieces in shards.items():
            for shard, piece in pieces:
                part = expected[f"{name}.weight"][
                    shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop
                ]
                torch.testing.assert_close(piece, part, atol=1e-5, rtol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


def names_of(group: dist.ProcessGroup) -> Any:
    dmp = shard_scores(group)
    dense = {name: tuple(param.shape) for name, param in dmp.dense_parameters().items()}
    return dense, list(dmp.fused_optimizer.params), list(dmp.state_dict())


def test_who_trains_what_can_be_told_from_parameters() -> None:
    bags = "ebc.embedding_bags"
    first, second = on_ranks(2, names_of)
    for number, (dense, fused, names) in enumerate((first, second)):
        assert fused == [f"{bags}.c.weight"]
        assert names == list(Scores().state_dict())
        assert dense[f"{bags}.a.weight"] == ((6, 16), (5, 16))[number]
        assert dense[f"{bags}.b.weight"] == ((0, 8), (3, 8))[number]  # every optimizer has every table
        assert dense["ec.embeddings.thing.weight"] == ((9, 8), (0, 8))[number]
        assert "layer.weight" in dense and f"{bags}.c.weight" not in dense


def gradients(group: dist.ProcessGroup, plan: ModuleSharding) -> Any:
    """Two backward passes before anyone looks; hooks see the gradients."""
    ebc = EmbeddingBagCollection(tables(), seed=3)
    env = ShardingEnv.from_process_group(group)
    sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, env, DEVICE)
    seen: list[str] = []
    for name, param in sharded.named_parameters():
        param.register_hook(lambda grad, name=name: seen.append(name))
    for parts in batches(group.size())[:2]:
        targets(sharded(parts[group.rank()]).wait()).mean().backward()
    return [(i.shard, i.parameter.grad) for table in sharded.tables().values() for i in table.local], seen


@pytest.mark.parametrize("kinds", [[T.ROW_WISE] * 3, [T.DATA_PARALLEL] * 3, MIXED], ids=["rw", "dp", "mixed"])
def test_gradients_add_up_until_they_are_taken(kinds: list[ShardingType]) -> None:
    ebc = EmbeddingBagCollection(tables(), seed=3)
    for parts in batches(2)[:2]:
        targets(ebc(join(parts))).mean().backward()
    for pieces, seen in on_ranks(2, gradients, plan_of(kinds, 2)):
        assert len(seen) == 2 * len(pieces)
        for shard, grad in pieces:
            whole = ebc.embedding_bags.get_parameter(f"{shard.table}.weight").grad
            assert whole is not None
            part = whole[shard.rows.start : shard.rows.stop, shard.cols.start : shard.cols.stop]
            torch.testing.assert_close(grad, part, atol=1e-5, rtol=1e-5)


def frozen(group: dist.ProcessGroup) -> bool:
    dmp = shard_scores(group, "ddd")
    for name, param in dmp.named_parameters():
        param.requires_grad_("embedding" not in name)
    (dmp(batches(2)[0][group.rank()]) / 4).backward()
    grads = {name: param.grad for name, param in dmp.named_parameters()}
    return all((grad is None) == ("embedding" in name) for name, grad in grads.items())


def test_frozen_tables_take_part_and_get_no_gradient() -> None:
    assert on_ranks(2, frozen) == [True, True]


def replicas(group: dist.ProcessGroup) -> Any:
    plan = plan_of([T.DATA_PARALLEL] * 3, 2)
    sharded = EmbeddingBagCollectionSharder().shard(
        EmbeddingBagCollection(tables(), seed=0), plan, ShardingEnv.from_process_group(group), DEVICE
    )
    optimizer = OPTIMIZERS["adam"](sharded.parameters())
    generator = torch.Generator().manual_seed(group.rank())
    for _ in range(4):
        optimizer.zero_grad()
        with comm.count_collectives() as counter:
            sharded(draw_kjt(generator, tables(), 300, 4)).wait().values().square().mean().backward()
        assert counter == exchanges(1) | {"all_gather": 1}  # touched rows, not gradients of whole tables
        optimizer.step()
    return [i.weight.clone() for table in sharded.tables().values() for i in table.local]


def test_dense_replicas_stay_bit_identical_without_an_all_reduce_of_their_gradients() -> None:
    first, second = on_ranks(2, replicas)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def obeys(group: dist.ProcessGroup) -> Any:
    """All tables are given an optimizer inside backward; replicas with a dense kernel are left to another."""
    ebc = EmbeddingBagCollection(tables(), seed=3)
    apply_optimizer_in_backward(torch.optim.SGD, ebc.parameters(), {"lr": 100.0})
    env, plan = ShardingEnv.from_process_group(group), plan_of([T.DATA_PARALLEL] * 3, 2)
    sharded = EmbeddingBagCollectionSharder().shard(ebc, plan, env, DEVICE)
    left = dict(in_backward_optimizer_filter(sharded.named_parameters()))
    assert len(left) == 3 and not sharded.fused_optimizer.params
    optimizer = torch.optim.SGD(left.values(), lr=0.1)
    targets(sharded(batches(2)[0][group.rank()]).wait()).mean().backward()
    optimizer.step()
    return {name: table.local[0].weight.clone() for name, table in sharded.tables().items()}


def test_a_replicated_table_with_a_dense_kernel_is_left_to_the_dense_optimizer() -> None:
    ebc = EmbeddingBagCollection(tables(), seed=3)
    optimizer = torch.optim.SGD(ebc.parameters(), lr=0.1)
    targets(ebc(join(batches(2)[0]))).mean().backward()
    optimizer.step()
    for answer in on_ranks(2, obeys):
        for name, weight in answer.items():
            expected = ebc.embedding_bags.get_parameter(f"{name}.weight")
            torch.testing.assert_close(weight, expected.detach(), atol=1e-6, rtol=1e-5)


def test_two_optimizers_for_a_table_and_unknown_kernels_are_refused_by_name() -> None:
    ebc = EmbeddingBagCollection(tables(), seed=3)
    env, device = ShardingEnv.from_local(1, 0), DEVICE
    plan = plan_of([T.TABLE_WISE] * 3, 1, "ffd")
    apply_optimizer_in_backward(torch.optim.SGD, [ebc.embedding_bags.get_parameter("c.weight")], {"lr": 0.1})
    with pytest.raises(ValueError, match=r"table 'c': its kernel is dense.*remove one of the two"):
        EmbeddingBagCollectionSharder().shard(ebc, plan, env, device)
    plan["b"] = cut(tables()[1], T.TABLE_WISE, [0], "sparse")
    with pytest.raises(ValueError, match=r"table 'b': unknown compute kernel 'sparse'; use one of dense, fused"):
        EmbeddingBagCollectionSharder().shard(ebc, plan, env, device)
