"""What a sharded model shows of itself: lazy results, wrappers, parameters and state by name, copies, checked ids."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed import (
    FP16,
    Awaitable,
    Codec,
    EmbeddingComputeKernel,
    EmbOptimType,
    ModuleSharding,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.distributed.collections.sharder import CollectionSharder
from rayrec.distributed.collections.variable_batch import Examples, same_size
from rayrec.distributed.comm.awaitable import Deferred, LazyAwaitable
from rayrec.distributed.data_parallel import table_parameters
from rayrec.distributed.ids.input_dist import IdCheck
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig, EmbeddingCollection, PoolingType
from rayrec.optim import apply_optimizer_in_backward
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.distributed import utils as helpers
from rayrec.torchrec.distributed.embedding_types import GroupedEmbeddingConfig, KJTList, ShardedEmbeddingTable
from rayrec.torchrec.distributed.model_parallel import (
    DataParallelWrapper,
    DefaultDataParallelWrapper,
    DistributedModelParallel,
    get_module,
    get_unwrapped_module,
)
from rayrec.torchrec.distributed.module_sharder import EmbeddingBagCollectionSharder, EmbeddingCollectionSharder
from rayrec.torchrec.distributed.types import (
    DeviceToHostTensorAwaitable,
    GetItemLazyAwaitable,
    LazyGetItemMixin,
    LazyNoWait,
    NoWait,
)
from tests.device import DEVICE
from tests.distributed.oracle import cut
from tests.ranks import on_ranks

CPU = torch.device("cpu")
T = ShardingType
QUICK = settings(max_examples=30, deadline=None)
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
    assert NoWait(4).wait() == LazyNoWait(4).wait() == Deferred(lambda: 4).wait() == 4


def test_items_of_a_lazy_result_are_lazy() -> None:
    class Keyed(LazyGetItemMixin[str, int], LazyAwaitable[dict[str, int]]):
        times = 0

        def _wait_impl(self) -> dict[str, int]:
            self.times += 1
            return {"a": 5}

    keyed = Keyed()
    item = keyed["a"]
    assert isinstance(item, GetItemLazyAwaitable) and keyed.times == 0
    assert (item + 1, item.wait(), keyed.times) == (6, 5, 1)
    moved = DeviceToHostTensorAwaitable(torch.arange(3))
    assert moved.wait().tolist() == [0, 1, 2] and moved.wait().device == CPU


# -- types that describe


def test_descriptions_of_grouped_tables_add_up() -> None:
    plain = ShardedEmbeddingTable(num_embeddings=4, embedding_dim=8)
    assert (plain.local_rows, plain.local_cols, plain.compute_kernel) == (0, 0, EmbeddingComputeKernel.DENSE)
    assert [plain.local_metadata, plain.global_metadata, plain.dtensor_metadata, plain.fused_params] == [None] * 4
    tables = [
        ShardedEmbeddingTable(
            10, 4, "t", feature_names=["a", "b"], embedding_names=["a@t", "b"], local_rows=5, local_cols=2
        ),
        ShardedEmbeddingTable(7, 8, "u", feature_names=["c"], embedding_names=["c"], local_cols=3),
    ]
    kernel = EmbeddingComputeKernel("batched_fused")
    assert kernel is EmbeddingComputeKernel.FUSED
    for unknown in ("batched_", "other", 3):
        with pytest.raises(ValueError, match="is not a valid EmbeddingComputeKernel"):
            EmbeddingComputeKernel(unknown)
    group = GroupedEmbeddingConfig(DataType.FP32, PoolingType.SUM, False, False, kernel, tables)
    assert (group.fused_params, group.enable_embedding_update) == (None, False)
    assert (group.feature_hash_sizes(), group.num_features(), group.dim_sum()) == ([10, 10, 7], 3, 7)
    assert (group.table_names(), group.feature_names()) == (["t", "u"], ["a", "b", "c"])
    assert (group.embedding_dims(), group.embedding_names()) == ([2, 2, 3], ["a@t", "b", "c"])


def test_lists_of_batches_are_recorded_one_by_one() -> None:
    seen = []

    class Item:
        def record_stream(self, stream: Any) -> None:
            seen.append((self, stream))

    items: Any = [Item(), Item()]
    held = KJTList(items)
    other: Any = Item()
    held[1] = other
    held.record_stream("stream")  # type: ignore[arg-type]
    assert seen == [(items[0], "stream"), (other, "stream")] and list(held) == [items[0], held[1]] and len(held) == 2


# -- the check of ids


def bag(name: str, rows: int, *features: str, dim: int = 4) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=list(features))


def problem(check: IdCheck, kjt: KeyedJaggedTensor) -> ValueError | None:
    try:
        check.check(kjt)
    except ValueError as error:
        return error
    return None


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[EmbeddingBagConfig], list[str], list[list[int]]]:
    """Tables that share features, keys in any order, one of them read by none, and ids around the edges."""
    sizes = draw(st.sampled_from([(3, 3), (3, 4), (5, 4), (8, 3)]))
    tables = [bag("t", sizes[0], "f", "g"), bag("u", sizes[1], "g", "h")]
    keys = draw(st.permutations(["f", "g", "h", "free"]))
    if draw(st.booleans()):
        keys = [key for key in keys if key != "free"]
    return tables, keys, [draw(st.lists(st.sampled_from([0, 1, 2, 2, 3, 4, -1]), max_size=2)) for _ in keys]


@settings(max_examples=80, deadline=None)
@given(batches())
def test_an_id_must_be_a_row_of_every_table_that_reads_it(
    given_: tuple[list[EmbeddingBagConfig], list[str], list[list[int]]],
) -> None:
    tables, keys, ids = given_
    limits: dict[str, int] = {}
    names: dict[str, str] = {}
    for table in tables:
        for feature in table.feature_names:
            if table.num_embeddings < limits.get(feature, table.num_embeddings + 1):
                limits[feature], names[feature] = table.num_embeddings, table.name
    bad = {
        key: one
        for key, of_key in zip(keys, ids, strict=True)
        for one in reversed(of_key)
        if key in limits and not 0 <= one < limits[key]
    }
    flat = torch.tensor([one for of_key in ids for one in of_key], dtype=torch.int64)
    kjt = KeyedJaggedTensor(keys, flat, lengths=torch.tensor([len(of_key) for of_key in ids]))
    check = IdCheck(tables, weighted=False)
    for _ in range(2):
        found = problem(check, kjt)
        if not bad:
            assert found is None
            continue
        feature = next(key for key in limits if key in bad)
        rows = f"the rows [0, {limits[feature]}) of table {names[feature]!r}"
        assert f"feature {feature!r}: id {bad[feature]} is outside {rows}" in str(found)


def test_batches_of_another_kind_are_refused() -> None:
    check, weighted = IdCheck([bag("t", 3, "f")], False), IdCheck([bag("t", 3, "f"), bag("u", 9, "g")], True)
    ids, lengths = torch.tensor([1, 2]), torch.tensor([1, 1])
    assert "no feature 'f'" in str(problem(check, KeyedJaggedTensor(["a"], ids, lengths=lengths)))
    assert "int64 or int32" in str(problem(check, KeyedJaggedTensor(["f"], ids.short(), lengths=lengths)))
    assert problem(check, KeyedJaggedTensor(["f"], ids.int(), lengths=lengths)) is None
    assert problem(check, KeyedJaggedTensor(["f"], ids[:0], lengths=lengths * 0)) is None
    both = KeyedJaggedTensor(["f", "g"], ids, lengths=lengths)
    assert "no weights" in str(problem(weighted, both))
    assert problem(weighted, KeyedJaggedTensor(["f", "g"], ids, torch.ones(2), lengths=lengths)) is None
    torn = KeyedJaggedTensor(["f"], ids, lengths=torch.tensor([1, 2]))
    assert "lengths add up to 3, but it has 2 ids" in str(problem(check, torn))
    twice = KeyedJaggedTensor(["f", "f"], torch.tensor([7, 1]), lengths=lengths)
    assert "feature 'f': id 7" in str(problem(check, twice)), "a key that comes twice, the first out of range"


# -- batches whose size varies by key


@QUICK
@given(st.lists(st.lists(st.integers(0, 2), max_size=3), min_size=1, max_size=3))
def test_distinct_lists_are_filled_up_to_one_batch(lengths: list[list[int]]) -> None:
    flat = [one for of_key in lengths for one in of_key]
    kjt = KeyedJaggedTensor(
        [f"f{n}" for n in range(len(lengths))],
        torch.arange(sum(flat)),
        lengths=torch.tensor(flat, dtype=torch.int64),
        stride_per_key_per_rank=[[len(of_key)] for of_key in lengths],
    )
    most, same = max(map(len, lengths)), same_size(kjt)
    assert same.stride() == most and torch.equal(same.values(), kjt.values())
    padded = [of_key + [0] * (most - len(of_key)) for of_key in lengths]
    assert same.lengths().tolist() == [one for of_key in padded for one in of_key]


def test_examples_are_made_of_the_lists_that_stand_for_them() -> None:
    examples = Examples(["g", "f", "g"], [4, 6, 2], CPU)
    inverse = (["f", "g"], torch.tensor([[0, 1, 1], [2, 0, 2]]))
    kjt = KeyedJaggedTensor(
        ["f", "g"],
        torch.arange(5),
        lengths=torch.ones(5, dtype=torch.int64),
        stride_per_key_per_rank=[[2], [3]],
        inverse_indices=inverse,
    )
    lists = examples.lists_of(kjt)
    assert lists.tolist() == [[2, 0, 2], [0, 1, 0], [2, 1, 2]]
    vectors = torch.arange(36.0).view(3, 12)
    expected = [torch.cat([vectors[g, :4], vectors[f, 4:10], vectors[h, 10:]]) for g, f, h in lists.tolist()]
    assert torch.equal(examples.expand(vectors, lists), torch.stack(expected))


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
    assert get_unwrapped_module(model) is model.module is get_module(model)
    assert helpers.get_unsharded_module_names(model.module) == ["first", "over"]
    deeper = nn.ModuleDict({"a": nn.ModuleDict({"b": model.module, "c": nn.ReLU()}), "d": nn.ReLU()})
    assert helpers.get_unsharded_module_names(deeper) == ["a.b.first", "a.b.over", "a.c", "d"]
    assert helpers.get_unsharded_module_names(nn.Linear(1, 1)) == [""]
    tables = [f"bags.embedding_bags.{name}.weight" for name in "tu"]
    assert table_parameters(model.module) == tables
    assert table_parameters(model.tables()["bags.embedding_bags.t"]) == ["weight"]
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


def test_copies_lie_where_they_are_asked_for() -> None:
    layer = nn.Linear(2, 2)
    layer.bias.requires_grad_(False)
    before = {kind: kind.__dict__.get("__deepcopy__") for kind in (torch.Tensor, nn.Parameter)}
    with helpers.sharded_model_copy("cpu"):
        other = copy.deepcopy(layer)
    with helpers.sharded_model_copy(None):
        same = copy.deepcopy(layer)
    assert before == {kind: kind.__dict__.get("__deepcopy__") for kind in before}
    assert torch.equal(other.weight, layer.weight) and other.weight.data_ptr() != layer.weight.data_ptr()
    assert same.weight.data_ptr() == layer.weight.data_ptr() and same.weight is not layer.weight
    for one in (other, same):
        assert one.weight.requires_grad and not one.bias.requires_grad
    table = parallel().tables()["bags.embedding_bags.t"]
    with helpers.sharded_model_copy("cpu"), pytest.raises(ValueError, match="sharded tables cannot be copied"):
        copy.deepcopy(table)
    assert not hasattr(type(table), "__deepcopy__")
    mixed = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1, device="meta")})
    twin = helpers.copy_to_device(mixed, CPU, torch.device("meta"))
    assert twin.a.weight.is_meta and not mixed.a.weight.is_meta
    assert helpers.optimizer_type_to_emb_opt_type(torch.optim.Adam) is EmbOptimType.ADAM
    helpers.init_parameters(mixed, CPU)
    assert not mixed.b.weight.is_meta


# -- defaults that users rely on

DEFAULTS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (
        DefaultDataParallelWrapper,
        (),
        {
            "bucket_cap_mb": 25,
            "static_graph": True,
            "find_unused_parameters": False,
            "allreduce_comm_precision": None,
            "params_to_ignore": None,
            "ddp_kwargs": None,
        },
    ),
    (
        CollectionSharder.__init__,
        (EmbeddingBagCollectionSharder(),),
        {
            "fused_params": None,
            "codec": None,
            "dedup": False,
            "by_table": None,
        },
    ),
]


@pytest.mark.parametrize(("make", "given_", "defaults"), DEFAULTS, ids=lambda one: getattr(one, "__qualname__", ""))
def test_defaults(make: Any, given_: tuple[Any, ...], defaults: dict[str, Any]) -> None:
    make(*given_)
    found = inspect.signature(make).parameters.values()
    assert {one.name: one.default for one in found if one.default is not one.empty} == defaults


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
    assert plain.data_parallel is around and get_module(plain) is around and get_unwrapped_module(plain) is inside
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
