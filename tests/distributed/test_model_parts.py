"""What a sharded model shows of itself: lazy results, wrappers, parameters and state by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed import (
    FP16,
    Awaitable,
    Codec,
    EmbOptimType,
    ModuleSharding,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.distributed.comm.awaitable import LazyAwaitable
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, EmbeddingConfig
from rayrec.optim import apply_optimizer_in_backward
from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.torchrec.distributed import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from rayrec.torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
)
from tests.device import DEVICE
from tests.distributed.oracle import cut
from tests.ranks import on_ranks

CPU = torch.device("cpu")
T = ShardingType
ALONE = ShardingEnv.from_local(1, 0)


# -- results that are waited for


class Counted(LazyAwaitable[torch.Tensor]):
    def __init__(self) -> None:
        self.times = 0

    def _wait_impl(self) -> torch.Tensor:
        self.times += 1
        return torch.tensor([1.0, -2.0, 3.0])


def test_a_lazy_result_is_waited_for_where_it_is_used_and_once() -> None:
    later, whole = Counted(), torch.tensor([1.0, -2.0, 3.0])
    assert later.times == 0 and not hasattr(later, "_nothing") and later.times == 0
    assert torch.equal(torch.stack([later, [later][0]]), torch.stack([whole, whole]))
    assert torch.equal(torch.cat(tensors=(later, whole)), torch.cat([whole, whole]))  # type: ignore[call-overload]
    assert torch.equal(torch.add(whole, other=later), whole * 2)  # type: ignore[call-overload]
    assert later.shape == (3,) and later[2] == 3 and len(later) == 3 and 3.0 in later
    assert [float(one) for one in later] == [1, -2, 3]
    assert torch.equal(later + later, whole * 2) and torch.equal(2 - later, 2 - whole)
    assert torch.equal(abs(later), whole.abs()) and torch.equal(-later, -whole)
    assert (later > Counted()).tolist() == [False] * 3 and (later == whole).all()
    assert later.times == 1 and later.wait() is later.wait()
    assert hash(later) == hash(later) != hash(Counted())


def test_callbacks_change_the_result_in_turn() -> None:
    class Three(Awaitable[int]):
        def _wait_impl(self) -> int:
            return 3

    first, second = Three(), Three()
    first.callbacks.append(lambda value: value + 1)
    first.callbacks.append(lambda value: value * 10)
    assert (first.wait(), first.wait(), second.wait(), len(second.callbacks)) == (40, 40, 3, 0)


def bag(name: str, rows: int, *features: str, dim: int = 4) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features))


def results() -> list[tuple[type[LazyAwaitable[Any]], Any]]:
    """The kind of result of each sharded collection, and a result."""
    features = KeyedJaggedTensor(["f"], torch.tensor([1, 0, 1]), lengths=torch.tensor([1, 2]))
    plan = {"t": cut(bag("t", 6, "f"), T.TABLE_WISE, [0])}
    lists = EmbeddingCollection([EmbeddingConfig(name="t", num_embeddings=6, embedding_dim=4, feature_names=["f"])])
    bags = EmbeddingBagCollection([bag("t", 6, "f")])
    of_bags = EmbeddingBagCollectionSharder().shard(bags, plan, ALONE, CPU)(features)
    of_lists = EmbeddingCollectionSharder().shard(lists, plan, ALONE, CPU)(features)
    return [(type(of_bags), of_bags.wait()), (type(of_lists), of_lists.wait())]


def test_looking_at_a_result_does_not_wait() -> None:
    def never() -> Any:
        raise AssertionError("waited")

    for kind, _ in results():
        out: Any = kind(never)  # type: ignore[call-arg]
        assert kind.__name__ in repr(out) and kind.__name__ in f"{out} {out!s}"
        assert not hasattr(out, "shape") and not hasattr(out, "no_such_name") and not hasattr(out, "_private")
        with pytest.raises(AttributeError, match=f"{kind.__name__!r} object has no attribute 'shape'"):
            out.shape  # noqa: B018
        with pytest.raises(AssertionError, match="waited"):
            hasattr(out, "values")


def test_every_public_attribute_of_a_result_is_reached() -> None:
    (bags_kind, bags), (lists_kind, lists) = results()
    assert isinstance(bags, KeyedTensor) and isinstance(lists["f"], JaggedTensor)
    for kind, result in ((bags_kind, bags), (lists_kind, lists)):
        for name in [name for name in dir(result) if not name.startswith("_")]:
            assert hasattr(kind(lambda: result), name)  # type: ignore[call-arg]  # noqa: B023
    out: Any = bags_kind(lambda: bags)  # type: ignore[call-arg]
    assert out.values().shape == (2, 4)
    changed: Any = bags_kind(lambda: bags)  # type: ignore[call-arg]
    changed.callbacks.append(lambda found: found.values())  # which may change the type
    assert changed.shape == (2, 4) and changed.dtype == torch.float32


# -- a model


class Model(nn.Module):
    """Tables, and layers of which one is only allocated later."""

    def __init__(self, over: str = "cpu") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(2, 2)
        self.bags = EmbeddingBagCollection([bag("t", 6, "f"), bag("u", 5, "g")], device="meta", seed=1)
        self.over = nn.Linear(8, 1, device=over)

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        return self.over(self.bags(kjt).values()).sum() + self.first(torch.ones(2)).sum()


KJT = KeyedJaggedTensor(["f", "g"], torch.tensor([1, 4, 2, 0]), lengths=torch.tensor([1, 1, 2, 0]))


def parallel(model: nn.Module | None = None, **settings_: Any) -> DistributedModelParallel:
    return DistributedModelParallel(model or Model(), env=ALONE, device=CPU, **settings_)


class Recording(DataParallelWrapper):
    def __init__(self) -> None:
        self.seen: list[Any] = []

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        self.seen.append((env, device))


def test_a_model_is_allocated_and_wrapped_unless_told_otherwise() -> None:
    wrapper, later = Recording(), Recording()
    model = parallel(Model("meta"), data_parallel_wrapper=wrapper)
    assert not model.module.over.weight.is_meta and wrapper.seen == [(ALONE, CPU)]
    assert torch.isfinite(model(KJT))
    bare = parallel(Model("meta"), data_parallel_wrapper=later, init_data_parallel=False, init_parameters=False)
    assert bare.module.over.weight.is_meta and later.seen == []
    bare.init_data_parallel()
    assert later.seen == [(ALONE, CPU)]
    with pytest.raises(ValueError, match="model_tracker_configs"):
        parallel(model_tracker_configs=0)
    no_reset = nn.Module()
    no_reset.weight = nn.Parameter(torch.empty(1, device="meta"))
    with pytest.raises(ValueError, match="module 'over' is on meta and has no reset_parameters"):
        parallel(nn.ModuleDict({"bags": Model().bags, "over": no_reset}))


def test_a_model_names_its_parts_as_the_unsharded_one() -> None:
    model = parallel()
    inner = Model()
    inner.over.bias.requires_grad_(False)
    frozen = parallel(inner)
    names = [name for name, _ in Model().named_parameters()]
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())
    assert [name for name, _ in model.bare_named_parameters("m")] == [f"m.{name}" for name in names]
    layers = ["first.weight", "first.bias", "over.weight", "over.bias"]
    assert list(model.other_parameters()) == list(model.dense_parameters()) == layers
    assert list(frozen.other_parameters()) == list(frozen.dense_parameters()) == layers[:3]
    assert list(model.tables()) == ["bags.embedding_bags.t", "bags.embedding_bags.u"]
    assert list(model.sharded_modules()) == list(model.plan.plan) == ["bags"]
    root = parallel(EmbeddingBagCollection([bag("t", 6, "f")], device="meta"))
    assert list(root.other_parameters()) == [] and list(root.tables()) == ["embedding_bags.t"]


def test_plans_must_be_of_the_model_and_of_the_world() -> None:
    model = parallel()
    for plan in ({}, {**model.plan.plan, "other": {}}):
        with pytest.raises(ValueError, match=r"plan and model differ in module '(bags|other)'; plan again"):
            parallel(plan=ShardingPlan(plan))
    for rank, world in ((0, 1), (1, 2)):
        far = {name: cut(bag(name, 6, "f"), T.TABLE_WISE, [rank]) for name in ("t",)}
        collection = EmbeddingBagCollection([bag("t", 6, "f")], device="meta")
        if world == 1:
            parallel(collection, plan=ShardingPlan({"": far}))
            continue
        with pytest.raises(ValueError, match="the plan is for 2 ranks or more, but there are 1"):
            parallel(collection, plan=ShardingPlan({"": far}))
    unknown = {"t": ParameterSharding("table_wise", "magic", shards=far["t"].shards)}
    with pytest.raises(ValueError, match="table 't': unknown compute kernel 'magic'; use one of dense, fused, "):
        EmbeddingBagCollectionSharder().shard(collection, unknown, ALONE, CPU)


def test_optimizers_inside_backward_are_the_tables_own_or_the_sharders() -> None:
    def kinds(kernel: str, kind: ShardingType, own: bool) -> list[float]:
        collection = EmbeddingBagCollection([bag("t", 6, "f")], seed=1)
        if own:
            apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.5})
        plan = {"t": cut(bag("t", 6, "f"), kind, [0], kernel)}
        sharded = EmbeddingBagCollectionSharder({"learning_rate": 0.25}).shard(collection, plan, ALONE, CPU)
        return [group["lr"] for group in sharded.fused_optimizer.param_groups]

    for kind in (T.TABLE_WISE, T.DATA_PARALLEL):
        assert (kinds("fused", kind, False), kinds("fused", kind, True)) == ([0.25], [0.5])
        assert kinds("dense", kind, False) == []
    assert kinds("dense", T.DATA_PARALLEL, True) == []
    with pytest.raises(ValueError, match=r"table 't': its kernel is dense, .*; remove one of the two"):
        kinds("dense", T.TABLE_WISE, True)


def test_the_learning_rate_is_handed_on_by_step_and_by_zero_grad() -> None:
    plan = {"t": cut(bag("t", 6, "f"), T.TABLE_WISE, [0])}
    collection = EmbeddingBagCollection([bag("t", 6, "f")], seed=1)
    sharded = EmbeddingBagCollectionSharder({"learning_rate": 0.25}).shard(collection, plan, ALONE, CPU)
    optimizer, (kernel,) = sharded.fused_optimizer, sharded.kernels()
    assert list(optimizer.params) == ["embedding_bags.t.weight"]
    for rate, hand_on in ((0.5, optimizer.step), (0.125, optimizer.zero_grad)):
        optimizer.param_groups[0]["lr"] = rate
        assert kernel.learning_rate != rate
        hand_on()
        assert kernel.learning_rate == rate


@pytest.mark.parametrize("make", [EmbeddingBagCollectionSharder, EmbeddingCollectionSharder])
def test_formats_are_given_as_a_codec_or_as_a_registry(make: Any) -> None:
    codec = Codec(FP16)
    assert make().codec is None and make(codec=codec).codec is codec
    assert make(None, {"a": codec, "b": Codec()}).codec is codec
    assert make(None, {"a": Codec()}, codec=codec).codec is codec
    assert [one._dedup for one in (make(), make(dedup=True), make(use_index_dedup=True))] == [False, True, True]
    assert make(None, {"a": codec}).qcomm_codecs_registry == {"a": codec} and make().qcomm_codecs_registry is None
    kind = EmbeddingBagCollection if make is EmbeddingBagCollectionSharder else EmbeddingCollection
    assert make.module_type is kind


def test_a_precision_that_there_is_not_is_refused() -> None:
    for precision in (None, "fp16", "bf16"):
        DefaultDataParallelWrapper(allreduce_comm_precision=precision)
    with pytest.raises(ValueError, match="allreduce_comm_precision='int8' must be 'fp16', 'bf16' or None"):
        DefaultDataParallelWrapper(allreduce_comm_precision="int8")


# -- on several ranks


def wrapped(group: dist.ProcessGroup) -> Any:
    """What is left of a model in its wrapper, and gradients of ranks whose losses differ by the factors 1 and 3."""
    env, plan = ShardingEnv.from_process_group(group), {"t": cut(bag("t", 6, "f"), T.TABLE_WISE, [1])}

    def model(layer: nn.Module, **settings_: Any) -> DistributedModelParallel:
        inner = nn.ModuleDict({"ebc": EmbeddingBagCollection([bag("t", 6, "f")]), "over": layer})
        inner.forward = lambda ones: layer(ones)  # type: ignore[method-assign, assignment]
        sharders = [EmbeddingBagCollectionSharder()]
        return DistributedModelParallel(inner, env, CPU, ShardingPlan({"ebc": plan}), sharders, **settings_)

    def gradients(**settings_: Any) -> list[float]:
        torch.manual_seed(1)
        layer = nn.Linear(1, 1)
        own = DefaultDataParallelWrapper(**settings_)
        held = model(layer, data_parallel_wrapper=own)
        (held(torch.tensor([[1.000244140625]])) * (1 + 2 * group.rank())).backward()
        assert layer.weight.grad is not None and layer.bias.grad is not None
        return [layer.weight.grad.item(), layer.bias.grad.item()]

    def refusal(of: Any) -> str:
        with pytest.raises(ValueError) as error:
            of(allreduce_comm_precision="bf16")
        return str(error.value)

    plain = model(nn.Linear(1, 1))
    around, inside = plain.data_parallel, plain.module
    assert isinstance(around, DistributedDataParallel) and around.module is inside
    plain.init_data_parallel()
    assert plain.data_parallel is around and plain.module is inside
    facts = [around.bucket_bytes_cap, around.static_graph, around.find_unused_parameters]
    facts += [around.gradient_as_bucket_view, sorted(around.parameters_to_ignore)]
    still = nn.Linear(1, 1).requires_grad_(False)
    assert not isinstance(model(still).data_parallel, DistributedDataParallel)
    counting = nn.BatchNorm1d(1, affine=True, track_running_stats=True)
    with_buffer = model(counting)
    counting.running_mean.fill_(group.rank())
    with_buffer.eval()(torch.ones(2, 1))
    return (
        facts,
        gradients(),
        gradients(params_to_ignore=["over.bias"]),
        gradients(allreduce_comm_precision="fp16"),
        counting.running_mean.item(),
        refusal(gradients),
    )


def test_what_is_left_is_averaged_over_ranks() -> None:
    for rank, (facts, plain, ignoring, rounded, buffer, refusal) in enumerate(on_ranks(2, wrapped)):
        assert facts == [25 << 20, False, False, True, ["ebc.embedding_bags.t.weight"] * rank]
        exact = 2 * 1.000244140625
        assert plain == [exact, 2.0]
        assert ignoring == [exact, 1.0 + 2 * rank]
        assert rounded == [2.0, 2.0]
        assert buffer == rank
        assert refusal.startswith("allreduce_comm_precision='bf16' needs GPUs")


TABLES = [bag("tw", 6, "a"), bag("rw", 7, "b"), bag("cw", 5, "c", dim=12), bag("dp", 4, "d")]
PLAN: ModuleSharding = {
    "tw": cut(TABLES[0], T.TABLE_WISE, [1]),
    "rw": cut(TABLES[1], T.ROW_WISE, [1, 0]),
    "cw": cut(TABLES[2], T.COLUMN_WISE, [0, 1, 0]),
    "dp": cut(TABLES[3], T.DATA_PARALLEL, [0, 1]),
}
RECTANGLES = {
    "tw": [(1, [0, 0], [6, 4])],
    "rw": [(1, [0, 0], [4, 4]), (0, [4, 0], [3, 4])],
    "cw": [(0, [0, 0], [5, 4]), (1, [0, 4], [5, 4]), (0, [0, 8], [5, 4])],
}
STRIPS = {
    "tw": [(1, [0], [6])],
    "rw": [(1, [0], [4]), (0, [4], [3])],
    "cw": [(0, [0, 0], [5, 1]), (1, [0, 1], [5, 1]), (0, [0, 2], [5, 1])],
}


def pieces(value: Any) -> Any:
    """Of a sharded tensor its shape, its rectangles and what lies here; of another its numbers."""
    if not isinstance(value, ShardedTensor):
        return value.tolist()
    shards = [
        (s.placement.rank(), str(s.placement.device()), list(s.shard_offsets), list(s.shard_sizes))
        for s in value.metadata().shards_metadata
    ]
    local = [(list(one.metadata.shard_offsets), one.tensor.tolist()) for one in value.local_shards()]
    return list(value.size()), value.dtype, sorted(shards), local


def shown(group: dist.ProcessGroup, kernel: str) -> Any:
    """Weights and state as a module shows them, and what it refuses to load."""
    rule = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD}
    plan = {c.name: ParameterSharding(PLAN[c.name].sharding_type, kernel, shards=PLAN[c.name].shards) for c in TABLES}
    env = ShardingEnv.from_process_group(group)
    sharded = EmbeddingBagCollectionSharder(rule).shard(EmbeddingBagCollection(TABLES, seed=1), plan, env, DEVICE)
    kjt = KeyedJaggedTensor(list("abcd"), torch.tensor([1, 2, 3, 3]), lengths=torch.ones(4, dtype=torch.int64))
    sharded(kjt).wait().values().sum().backward()
    state = sharded.state_dict()
    weights = {name: pieces(value) for name, value in state.items()}
    optimizer = {
        name: {key: pieces(value) for key, value in values.items()}
        for name, values in sharded.fused_optimizer.state_dict()["state"].items()
    }
    texts = [table.extra_repr() for table in sharded.tables().values()]
    missing, unexpected = sharded.load_state_dict({}, strict=False)
    assert sorted(missing) == sorted(state) and not unexpected
    with pytest.raises(RuntimeError, match=r"tw.weight: the table has shape \(6, 4\), the state dict \(6, 5\)"):
        sharded.load_state_dict({**state, "embedding_bags.tw.weight": torch.zeros(6, 5)})
    parameters = {name: tuple(value.shape) for name, value in sharded.named_parameters()}
    gathered = [name for name, value in sharded.named_parameters() if hasattr(value, "_gather_over_ranks")]
    return weights, optimizer, texts, parameters, gathered, sorted(sharded.fused_optimizer.params)


def test_tables_are_shown_under_their_own_names_with_all_their_rectangles() -> None:
    dims = {"tw": [6, 4], "rw": [7, 4], "cw": [5, 12]}
    answers = on_ranks(2, shown, "fused")
    for rank, (weights, optimizer, _, parameters, gathered, params) in enumerate(answers):
        for name, rectangles in RECTANGLES.items():
            shape, dtype, found, local = weights[f"embedding_bags.{name}.weight"]
            assert (shape, dtype) == (dims[name], torch.float32)
            assert found == sorted((r, str(DEVICE), *rest) for r, *rest in rectangles)
            assert [offsets for offsets, _ in local] == [offsets for r, offsets, _ in rectangles if r == rank]
            if f"embedding_bags.{name}.weight" in optimizer:
                (value,) = optimizer[f"embedding_bags.{name}.weight"].values()
                shape, _, found, local = value
                assert shape == (dims[name][:1] if name != "cw" else [5, 3])
                assert found == sorted((r, str(DEVICE), *rest) for r, *rest in STRIPS[name])
                mine = [(offsets, sizes) for r, offsets, sizes in STRIPS[name] if r == rank]
                assert [(offsets, list(torch.tensor(rows).shape)) for offsets, rows in local] == mine
        assert len(weights["embedding_bags.dp.weight"]) == 4
        held = {name for name, rectangles in RECTANGLES.items() if any(r == rank for r, *_ in rectangles)} | {"dp"}
        assert set(optimizer) == {f"embedding_bags.{name}.weight" for name in held}
        assert [list(values) for values in optimizer.values()] == [
            [f"{name.split('.')[1]}.momentum1"] for name in optimizer
        ]
        assert gathered == [] and sorted(parameters) == params
        assert ("embedding_bags.cw.weight_1" in params) == (rank == 0)
    assert answers[0][2] == [
        "6, 4, no local shard",
        "7, 4, rows [4, 7) cols [0, 4)",
        "5, 12, rows [0, 5) cols [0, 4), rows [0, 5) cols [8, 12)",
        "4, 4, rows [0, 4) cols [0, 4)",
    ]


def test_parameters_of_dense_tables_are_on_every_rank() -> None:
    """A rank without a rectangle has an empty one; norms over ranks gather those of tables that are cut."""
    for rank, (_, optimizer, _, parameters, gathered, params) in enumerate(on_ranks(2, shown, "dense")):
        assert (optimizer, params) == ({}, [])
        assert parameters == {
            "embedding_bags.tw.weight": ((0, 4), (6, 4))[rank],
            "embedding_bags.rw.weight": ((3, 4), (4, 4))[rank],
            "embedding_bags.cw.weight": (5, 4),
            "embedding_bags.dp.weight": (4, 4),
            **({} if rank else {"embedding_bags.cw.weight_1": (5, 4)}),
        }
        assert sorted(gathered) == sorted(name for name in parameters if ".dp." not in name)


def loaded_elsewhere(group: dist.ProcessGroup) -> str:
    env = ShardingEnv.from_process_group(group)
    one, other = (
        EmbeddingBagCollectionSharder().shard(
            EmbeddingBagCollection(TABLES[1:2]), {"rw": cut(TABLES[1], T.ROW_WISE, ranks)}, env, DEVICE
        )
        for ranks in ([0, 1], [1, 0])
    )
    with pytest.raises(ValueError) as caught:
        other.load_state_dict(one.state_dict())
    return str(caught.value)


def test_a_state_dict_that_is_sharded_in_another_way_is_refused() -> None:
    assert set(on_ranks(2, loaded_elsewhere)) == {
        "embedding_bags.rw.weight: the state dict has other shards; load it through rayrec.checkpoint"
    }
