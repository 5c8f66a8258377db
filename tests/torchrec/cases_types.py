"""Cases of the types around sharding: results that are waited for, kinds, and parts of plans written by hand."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from tests.torchrec.case import Cases
from tests.torchrec.cases_distributed import bags, kjt, one_rank, rectangles, trained
from tests.torchrec.cases_modules import fill, tables
from tests.torchrec.package import Package, attempt

CASES = case = Cases()


def members(kind: Any) -> list[Any]:
    return [(member.name, member.value) for member in kind]


def fields(kind: Any) -> list[Any]:
    """Names of a dataclass's fields in order, with the defaults that are plain."""
    return [
        (f.name, None if f.default is dataclasses.MISSING else f.default)
        for f in dataclasses.fields(kind)
        if f.name != "data_type"
    ]


@case("5/Awaitable.wait")
def callbacks(rec: Package) -> Any:
    class Later(rec("distributed.types").Awaitable):  # type: ignore[misc, name-defined]
        def _wait_impl(self) -> int:
            return 3

    later = Later()
    later.callbacks.append(lambda value: value + 1)
    later.callbacks.append(lambda value: value * 10)
    return [later.wait(), later.wait(), len(later.callbacks)]


@case("5/Awaitable.wait", "the work is done once; every wait gives the same object")
def waiting_twice(rec: Package) -> Any:
    class Later(rec("distributed.types").Awaitable):  # type: ignore[misc, name-defined]
        times = 0

        def _wait_impl(self) -> int:
            self.times += 1
            return self.times

    later = Later()
    return [later.wait(), later.wait()]


@case("5/LazyNoWait")
def lazy_items(rec: Package) -> Any:
    home = rec("distributed.types")

    class Keyed(home.LazyGetItemMixin, home.LazyAwaitable):  # type: ignore[misc, name-defined]
        def _wait_impl(self) -> dict[str, torch.Tensor]:
            return {"a": torch.arange(3.0)}

    item = Keyed()["a"]
    return [
        isinstance(item, home.GetItemLazyAwaitable),
        item + 1,
        torch.relu(home.LazyNoWait(torch.arange(2.0))),
        home.LazyNoWait(obj=torch.ones(2)).shape,
        home.GetItemLazyAwaitable(home.LazyNoWait({"b": 5}), "b").wait(),
    ]


@case("5/NoWait")
def no_wait_is_not_lazy(rec: Package) -> Any:
    home = rec("distributed.types")
    return [isinstance(home.NoWait(3), home.LazyAwaitable), home.NoWait(obj=4).wait()]


@case("5/DeviceToHostTensorAwaitable", "it works on a machine without a GPU too")
def to_host(rec: Package) -> Any:
    return rec("distributed.types").DeviceToHostTensorAwaitable(torch.arange(3)).wait()


@case("5/DeviceToHostTensorAwaitable")
def to_host_is_lazy(rec: Package) -> Any:
    home = rec("distributed.types")
    return issubclass(home.DeviceToHostTensorAwaitable, home.LazyAwaitable)


@case("5/PipelineType")
def plain_kinds(rec: Package) -> Any:
    home = rec("distributed.types")
    names = "PipelineType ComputeKernel EmbeddingEvent ParameterStorage CommOp StorageUsageType"
    return {name: members(getattr(home, name)) for name in names.split()}


@case("5/CacheAlgorithm")
def cache_kinds(rec: Package) -> Any:
    home = rec("distributed.types")
    return [
        members(home.CacheAlgorithm),
        members(home.BoundsCheckMode),
        list(home.MultiPassPrefetchConfig()),
        sorted(name for name in vars(home.CacheStatistics) if not name.startswith("_")),
    ]


@case("5/CacheParams")
def cache_settings(rec: Package) -> Any:
    home = rec("distributed.types")
    given = home.CacheParams(home.CacheAlgorithm.LFU, 0.3, 1.5, None, True)
    return [
        fields(home.CacheParams),
        given.algorithm,
        given.load_factor,
        given.reserved_memory,
        given.prefetch_pipeline,
    ]


@case("5/KeyValueParams")
def key_value_settings(rec: Package) -> Any:
    home = rec("distributed.types")
    return [fields(home.KeyValueParams), home.KeyValueParams("/ssd").ssd_storage_directory]


@case("5/ShardMetadata")
def of_torch(rec: Package) -> Any:
    home = rec("distributed.types")
    names = "ShardMetadata EnumerableShardingSpec ShardedTensor ShardedTensorMetadata ShardingSpec"
    return [getattr(home, name).__module__ for name in names.split()]


@case(
    "5/ShardMetadata", "types.Shard is a rectangle of a table; torch's is torch.distributed._shard.sharded_tensor.Shard"
)
def shard_of_torch(rec: Package) -> Any:
    return rec("distributed.types").Shard.__module__


def by_hand(rec: Package, kind: str, *rectangles_of: Any) -> Any:
    """A table's sharding as scripts write it."""
    home = rec("distributed.types")
    pieces = [home.ShardMetadata(offsets, sizes, placement) for offsets, sizes, placement in rectangles_of]
    ranks = [int(placement.split(":")[1].split("/")[0]) for *_, placement in rectangles_of]
    return home.ParameterSharding(kind, "fused", ranks, home.EnumerableShardingSpec(pieces))


@case("5/ParameterSharding")
def sharding_by_hand(rec: Package) -> Any:
    home = rec("distributed.types")
    rows = by_hand(rec, "row_wise", ([0, 0], [5, 4], "rank:0/cuda:0"), ([5, 0], [5, 4], "rank:1/cuda:1"))
    away = by_hand(rec, "table_wise", ([0, 0], [10, 4], "rank:3/cuda:1"))
    twice = by_hand(rec, "column_wise", ([0, 0], [10, 4], "rank:1/cpu"), ([0, 4], [10, 4], "rank:1/cpu"))
    copies = home.ParameterSharding("data_parallel", "dense", [0, 1])
    out = [[p.sharding_type, p.compute_kernel, p.ranks, rectangles(p)] for p in (rows, away, twice, copies)]
    cached = home.ParameterSharding(
        sharding_type="table_wise", compute_kernel="fused_uvm_caching", cache_params=home.CacheParams(load_factor=0.1)
    )
    return [out, copies.sharding_spec, cached.cache_params.load_factor, cached.ranks or None]


@case("5/ParameterSharding")
def plan_by_hand(rec: Package) -> Any:
    home = rec("distributed.types")
    plan = home.ShardingPlan(
        {
            "ebc": home.EmbeddingModuleShardingPlan(
                {
                    "t": by_hand(rec, "row_wise", ([0, 0], [6, 4], "rank:0/cpu"), ([6, 0], [4, 4], "rank:1/cpu")),
                    "u": home.ParameterSharding("data_parallel", "dense", [0, 1]),
                }
            )
        }
    )
    return [str(plan).split(), sorted(plan.get_plan_for_module(module_path="ebc"))]


@case("5/ParameterSharding")
def plan_by_hand_runs(rec: Package) -> Any:
    home = rec("distributed.types")
    with one_rank():
        ebc = fill(bags(rec, "cpu"))
        weights = {f"ebc.{name}": value.clone() for name, value in ebc.state_dict().items()}
        rec.optim.apply_optimizer_in_backward(torch.optim.SGD, ebc.embedding_bags["t"].parameters(), {"lr": 0.1})
        rows, dim = ebc.embedding_bags["t"].weight.shape
        tables_plan = home.EmbeddingModuleShardingPlan(
            {
                "t": by_hand(rec, "table_wise", ([0, 0], [rows, dim], "rank:0/cpu")),
                "u": home.ParameterSharding("data_parallel", "dense", [0]),
            }
        )
        model = rec("distributed.model_parallel").DistributedModelParallel(
            torch.nn.ModuleDict({"ebc": ebc}), device=torch.device("cpu"), plan=home.ShardingPlan({"ebc": tables_plan})
        )
        model.load_state_dict({**model.state_dict(), **weights})
        return model.module["ebc"](kjt(rec)).wait().values()


@case("5/ShardingPlanner")
def bases(rec: Package) -> Any:
    home = rec("distributed.types")
    context = home.NullShardedModuleContext()
    planner = rec("distributed.planner").EmbeddingShardingPlanner
    return [
        issubclass(planner, home.ShardingPlanner),
        attempt(lambda: home.ShardingPlanner()),
        attempt(lambda: setattr(context, "a", 1)),
        home.NullShardingContext().record_stream(None),
    ]


@case("5/ShardedModule")
def own_sharded_module(rec: Package) -> Any:
    home = rec("distributed.types")

    class Twin(home.ShardedModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Parameter(torch.arange(8.0).view(4, 2))

        def create_context(self) -> Any:
            return home.NullShardedModuleContext()

        def input_dist(self, ctx: Any, ids: torch.Tensor) -> Any:
            return home.NoWait(home.NoWait(ids))

        def compute(self, ctx: Any, dist_input: torch.Tensor) -> torch.Tensor:
            return self.table[dist_input]

        def output_dist(self, ctx: Any, output: torch.Tensor) -> Any:
            return home.LazyNoWait(output)

        @property
        def unsharded_module_type(self) -> type:
            return torch.nn.Embedding

    twin = Twin()
    return [twin(torch.tensor([2, 0])) * 2, list(twin.sharded_parameter_names("x")), twin.qcomm_codecs_registry]


@case("5/ModuleSharder")
def defaults_of_sharders(rec: Package) -> Any:
    class Sharder(rec("distributed.types").ModuleSharder):  # type: ignore[misc, name-defined]
        def shard(self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> Any:
            return module

        @property
        def module_type(self) -> type:
            return torch.nn.Linear

    sharder = Sharder()
    return [
        sorted(sharder.shardable_parameters(torch.nn.Linear(2, 2))),
        sharder.sharding_types("cpu"),
        sharder.compute_kernels("data_parallel", "cpu"),
        [sharder.storage_usage(torch.zeros(3, 2), device, "dense") for device in ("cuda", "cpu")],
    ]


@case("5/embedding_types.OptimType")
def embedding_types(rec: Package) -> Any:
    home = rec("distributed.embedding_types")
    pair = home.KJTList([kjt(rec), kjt(rec)])
    pair[1] = pair[0]
    config = rec("modules.embedding_configs")
    table = home.ShardedEmbeddingTable(
        10, 4, "t", feature_names=["a", "b"], embedding_names=["a", "b@t"], local_rows=5, local_cols=2
    )
    group = home.GroupedEmbeddingConfig(
        config.DataType.FP32, config.PoolingType.SUM, False, False, home.EmbeddingComputeKernel.FUSED, [table]
    )
    return [
        members(home.OptimType),
        [len(pair), len(list(pair)), pair[1] is pair[0]],
        [group.feature_hash_sizes(), group.num_features(), group.dim_sum(), group.table_names()],
        [group.feature_names(), group.embedding_dims(), group.embedding_names(), table.compute_kernel.value],
        issubclass(home.ShardedEmbeddingModule, rec("distributed.types").ShardedModule),
    ]


@case("5/embedding_types.OptimType")
def base_of_own_sharders(rec: Package) -> Any:
    class Sharder(rec("distributed.embedding_types").BaseEmbeddingSharder):  # type: ignore[misc, name-defined]
        def shard(self, module: Any, params: Any, env: Any, device: Any = None, module_fqn: Any = None) -> Any:
            return module

        def shardable_parameters(self, module: Any) -> Any:
            return {}

        @property
        def module_type(self) -> type:
            return torch.nn.Linear

    sharder = Sharder({"learning_rate": 0.3})
    return [
        sharder.fused_params,
        sharder.storage_usage(torch.zeros(3, 2), "cuda", "fused_uvm"),
        {"data_parallel", "table_wise", "column_wise"} <= set(sharder.sharding_types("cpu")),
        "fused" in sharder.compute_kernels("table_wise", "cpu"),
    ]


@case("6/init_data_parallel")
def data_parallel_later(rec: Package) -> Any:
    with one_rank():
        make = rec("distributed.model_parallel").DistributedModelParallel
        model = torch.nn.ModuleDict({"ebc": bags(rec, "cpu"), "over": torch.nn.Linear(2, 2)})
        parallel = make(model, None, torch.device("cpu"), None, None, False)
        inside = parallel.module is model
        parallel.init_data_parallel()
        parallel.init_data_parallel()
        return [inside, parallel.module is model, sorted(parallel.state_dict())]


@case("6/DefaultDataParallelWrapper")
def wrapper_of_ones_own(rec: Package) -> Any:
    home = rec("distributed.model_parallel")

    class Wrapper(home.DataParallelWrapper):  # type: ignore[misc, name-defined]
        def wrap(self, dmp: Any, env: Any, device: Any) -> None:
            seen.append([type(dmp).__name__, env.world_size, device])
            dmp._dmp_wrapped_module.register_buffer("seen", torch.ones(1))

    with one_rank():
        out, seen = [], []
        given = (15, True, True, "fp16", ["over.bias"], {"mixed_precision": None})
        defaults = home.DefaultDataParallelWrapper(bucket_cap_mb=10, find_unused_parameters=True)
        for wrapper in (Wrapper(), defaults, home.DefaultDataParallelWrapper(*given)):
            model = torch.nn.ModuleDict({"ebc": bags(rec, "cpu"), "over": torch.nn.Linear(2, 2)})
            parallel = home.DistributedModelParallel(model, device=torch.device("cpu"), data_parallel_wrapper=wrapper)
            out.append([parallel.module is model, sorted(parallel.state_dict())])
        return [out, seen]


@case("6/bare_named_parameters")
def bare_parameters(rec: Package) -> Any:
    with one_rank():
        model, _ = trained(rec, "table_wise")
        return sorted(name for name, _ in model.bare_named_parameters())


@case("6/model_parallel.get_unwrapped_module")
def unwrapped(rec: Package) -> Any:
    home = rec("distributed.model_parallel")
    with one_rank():
        model = torch.nn.ModuleDict({"ebc": bags(rec, "cpu"), "over": torch.nn.Linear(2, 2)})
        parallel = home.DistributedModelParallel(model, device=torch.device("cpu"))
        around = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
        return [
            home.get_unwrapped_module(parallel) is model,
            home.get_unwrapped_module(around) is around.module,
            home.get_module(around) is around,
            home.get_unwrapped_module(home.get_module(parallel)) is model,
        ]


@case("6/reset_parameters")
def reset_of_sharded(rec: Package) -> Any:
    with one_rank():
        model, weights = trained(rec, "table_wise")
        model.load_state_dict({**model.state_dict(), **weights})
        ebc = model.module["ebc"]
        before = ebc(kjt(rec)).wait().values().clone()
        ebc.reset_parameters()
        after = ebc(kjt(rec)).wait().values()
        return [before.shape == after.shape, bool((before != after).any()), hasattr(model, "reset_parameters")]


@case("6/get_group_rank")
def hosts_of_ranks(rec: Package) -> Any:
    home = rec("distributed.comm")
    with one_rank():
        sizes = [
            home.get_local_size(16),
            home.get_num_groups(16),
            home.get_group_rank(16, 9),
            home.get_node_group_size(16),
        ]
        inside, across = home.intra_and_cross_node_pg(torch.device("cpu"))
        return [sizes, inside.size(), across.size(), home.intra_and_cross_node_pg(torch.device("meta"))]


@case("6/get_unsharded_module_names")
def helpers_of_utils(rec: Package) -> Any:
    home = rec("distributed.utils")
    state = {"a.x": 1, "b.y": 2}
    prefixed = dict(state)
    home.add_prefix_to_state_dict(prefixed, "m.")
    optim = rec.optim
    named = home.optimizer_type_to_emb_opt_type
    with one_rank():
        model, _ = trained(rec, "table_wise")
        unsharded = [name.split(".")[-1] for name in home.get_unsharded_module_names(model)]
    return [
        [home.append_prefix("a", "b"), home.append_prefix("", "b"), home.append_prefix("a", "")],
        [home.none_throws(3), attempt(lambda: home.none_throws(None))],
        [home.filter_state_dict(state, "a"), sorted(prefixed), unsharded],
        home.merge_fused_params({"learning_rate": 0.1, "eps": 1.0}, {"lr": 0.2})["learning_rate"],
        [named(kind).value for kind in (torch.optim.SGD, torch.optim.Adagrad, torch.optim.Adam, optim.RowWiseAdagrad)],
        attempt(lambda: named(torch.optim.Rprop)),
        home.get_device_type() in ("cpu", "cuda"),
    ]


@case("6/get_unsharded_module_names", "it works in a build without NCCL too, and refuses sharded tables")
def copies_of_models(rec: Package) -> Any:
    import copy

    home = rec("distributed.utils")
    layer = torch.nn.Linear(2, 2)
    with home.sharded_model_copy(torch.device("cpu")):
        other = copy.deepcopy(layer)
    with home.sharded_model_copy(None):
        same = copy.deepcopy(layer)
    twin = home.copy_to_device(layer, torch.device("cpu"), torch.device("meta"))
    copyable = type("M", (home.CopyableMixin,), {})()
    copyable.layer = torch.nn.Linear(1, 1)
    return [
        bool((other.weight == layer.weight).all()) and other.weight.data_ptr() != layer.weight.data_ptr(),
        same.weight.data_ptr() == layer.weight.data_ptr(),
        [twin.weight.device, copyable.copy(torch.device("meta")).layer.weight.device],
    ]


@case("6/invoke_on_rank_and_broadcast_result")
def on_one_rank(rec: Package) -> Any:
    import torch.distributed as dist

    home = rec("distributed.collective_utils")
    with one_rank():
        group = dist.group.WORLD

        @home.run_on_leader(group, 0)
        def add(a: int, b: int = 1) -> int:
            return a + b

        answer = home.invoke_on_rank_and_broadcast_result(group, 0, lambda x: x * 2, 4)
        return [answer, add(3, b=4), home.is_leader(group), home.is_leader(None), home.is_leader(None, 1)]


@case("2/fused_embedding_modules.FusedEmbeddingBagCollection")
def sharders_of_fused_collections(rec: Package) -> Any:
    home = rec("distributed.fused_embeddingbag")
    kind = rec("modules.fused_embedding_modules").FusedEmbeddingBagCollection
    return home.FusedEmbeddingBagCollectionSharder().module_type is kind


def fused_training(rec: Package, make: Any) -> Any:
    module = make()
    fill(module)
    for _ in range(2):
        (module(kjt(rec)).values() * 0.5).sum().backward()
    return module


@case("2/fused_embedding_modules.FusedEmbeddingBagCollection")
def fused_bags(rec: Package) -> Any:
    kind = rec("modules.fused_embedding_modules").FusedEmbeddingBagCollection
    out = []
    for optimizer in (torch.optim.SGD, rec.optim.RowWiseAdagrad):
        module = fused_training(rec, lambda: kind(tables(rec), optimizer, {"lr": 0.1}))  # noqa: B023
        groups = [group["lr"] for group in module.fused_optimizer().param_groups]
        out.append([module.state_dict(), sorted(set(groups)), module(kjt(rec)).values()])
        out.append([module.optimizer_type() is optimizer, module.optimizer_kwargs(), module.is_weighted()])
    return out


@case("2/fused_embedding_modules.FusedEmbeddingCollection")
def fused_sequences(rec: Package) -> Any:
    kind = rec("modules.fused_embedding_modules").FusedEmbeddingCollection
    module = kind(tables(rec, "EmbeddingConfig"), torch.optim.SGD, {"lr": 0.1}, torch.device("meta"), True)
    return [sorted(module.state_dict()), module.embedding_dim(), module.need_indices(), module.optimizer_kwargs()]


@case("2/fused_embedding_modules.FusedEmbeddingCollection", "it works on a CPU too")
def fused_sequences_on_cpu(rec: Package) -> Any:
    kind = rec("modules.fused_embedding_modules").FusedEmbeddingCollection
    return kind(tables(rec, "EmbeddingConfig"), torch.optim.SGD, {"lr": 0.1}).embedding_dim()


@case("2/fused_embedding_modules.fuse_embedding_optimizer")
def fused_model(rec: Package) -> Any:
    model = torch.nn.ModuleDict({"ebc": bags(rec, "cpu"), "over": torch.nn.Linear(2, 2)})
    names = sorted(model.state_dict())
    fuse = rec("modules.fused_embedding_modules").fuse_embedding_optimizer
    same = fuse(model, torch.optim.SGD, {"lr": 0.1}, torch.device("cpu"))
    return [same is model, type(model["ebc"]).__name__, sorted(model.state_dict()) == names]


@case("2/lazy_extension.LazyModuleExtensionMixin")
def lazy_modules(rec: Package) -> Any:
    home = rec("modules.lazy_extension")

    class Scale(home.LazyModuleExtensionMixin, torch.nn.Module):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.UninitializedParameter()

        def initialize_parameters(self, values: torch.Tensor, factor: float) -> None:
            self.weight.materialize((values.shape[1],))
            torch.nn.init.constant_(self.weight, factor)

        def forward(self, values: torch.Tensor, factor: float) -> torch.Tensor:
            return values * self.weight * factor

    def halve(module: torch.nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            torch.nn.init.constant_(parameter, 0.5)

    scale, linear = Scale(), torch.nn.LazyLinear(1)
    early = attempt(lambda: scale.apply(halve) and None)
    first = scale(torch.ones(1, 2), factor=3.0)
    scale.apply(halve)
    home.lazy_apply(linear, halve)
    before = linear(torch.ones(1, 2)).shape
    return [early, first, scale(torch.ones(1, 2), factor=1.0), before, linear(torch.ones(1, 2))]


@case("2/VirtualTableEvictionPolicy")
def eviction_policies(rec: Package) -> Any:
    home = rec("modules.embedding_configs")
    names = "VirtualTable CountBased TimestampBased CountTimestampMixed FeatureScoreBased FeatureL2NormBased No"
    return {name: fields(getattr(home, f"{name}EvictionPolicy")) for name in names.split()}


@case("1/jt.pin_memory")
def pinning(rec: Package) -> Any:
    jagged = rec.JaggedTensor(torch.ones(2), lengths=torch.tensor([1, 1]))
    return attempt(lambda: jagged.pin_memory() and None)


@case("0/torchrec.datasets")
def packages(rec: Package) -> Any:
    names = "datasets datasets.utils datasets.random datasets.criteo datasets.movielens inference quant metrics "
    names += "metrics.metric_module metrics.metrics_config metrics.rec_metric metrics.ne metrics.auc metrics.throughput"
    return [attempt(lambda name=name: bool(rec(name))) for name in names.split()]
