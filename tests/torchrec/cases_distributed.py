"""Cases of plans, sharding and what is around them, on one gloo rank."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.torchrec.case import Cases
from tests.torchrec.cases_modules import fill, kjt, tables
from tests.torchrec.package import Package, attempt

CASES = case = Cases()


@contextlib.contextmanager
def one_rank() -> Iterator[None]:
    """A default process group of this process alone."""
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def bags(rec: Package, device: str = "meta") -> Any:
    return rec.EmbeddingBagCollection(tables=tables(rec), device=torch.device(device))


def rectangles(sharding: Any) -> list[Any]:
    """(offsets, sizes, placement) of every shard."""
    spec = sharding.sharding_spec
    return [] if spec is None else [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in spec.shards]


def plan_of(rec: Package, first: Any, second: Any, world: int = 2, local: int = 2, device: str = "cpu") -> Any:
    home = rec("distributed.sharding_plan")
    plan = home.construct_module_sharding_plan(
        bags(rec), {"t": first, "u": second}, local_size=local, world_size=world, device_type=device
    )
    return {name: [p.sharding_type, p.compute_kernel, p.ranks, rectangles(p)] for name, p in plan.items()}


def whole(value: Any) -> torch.Tensor:
    """A table of one rank, sharded or not."""
    return value.local_shards()[0].tensor if hasattr(value, "local_shards") else value


@case("6/data_parallel")
def generators(rec: Package) -> Any:
    by = rec("distributed.sharding_plan")
    return [
        plan_of(rec, by.table_wise(1), by.data_parallel()),
        plan_of(rec, by.row_wise(), by.column_wise(ranks=[1])),
        plan_of(rec, by.row_wise(compute_kernel="fused"), by.column_wise(size_per_rank=[4])),
        plan_of(rec, by.table_row_wise(1), by.table_wise(rank=3, compute_kernel="fused"), 4, 2),
        attempt(lambda: plan_of(rec, by.column_wise(ranks=[0, 1, 0]), by.table_wise(0))),
    ]


@case("6/sharding_plan.construct_module_sharding_plan")
def constructed(rec: Package) -> Any:
    by = rec("distributed.sharding_plan")
    ebc = bags(rec)
    rec.optim.apply_optimizer_in_backward(torch.optim.SGD, ebc.embedding_bags["t"].parameters(), {"lr": 0.1})
    plan = by.construct_module_sharding_plan(
        ebc, {"t": by.table_wise(0), "u": by.table_wise(1)}, local_size=2, world_size=2, device_type="cpu"
    )
    make = by.construct_module_sharding_plan
    sizes = {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    missing = attempt(lambda: make(bags(rec), {"t": by.table_wise(0)}, **sizes) and None)
    extra = {name: by.table_wise(0) for name in "tuz"}
    return [
        {name: p.compute_kernel for name, p in plan.items()},
        missing,
        attempt(lambda: make(bags(rec), extra, **sizes) and None),
    ]


@case("6/sharding_plan.apply_to_all")
def applied_to_all(rec: Package) -> Any:
    by = rec("distributed.sharding_plan")
    kinds = by.get_module_to_default_sharders()
    return [
        sorted(by.apply_to_all(bags(rec), by.row_wise())),
        [kind in kinds for kind in (rec.EmbeddingBagCollection, rec.EmbeddingCollection)],
        len(by.get_default_sharders()) >= 2,
    ]


@case("6/model_parallel.get_default_sharders")
def default_sharders(rec: Package) -> Any:
    names = [type(sharder).__name__ for sharder in rec("distributed.model_parallel").get_default_sharders()]
    return sorted({"EmbeddingBagCollectionSharder", "EmbeddingCollectionSharder"} & set(names))


@case("6/calculate_shard_sizes_and_offsets")
def shard_sizes(rec: Package) -> Any:
    by, table = rec("distributed.sharding_plan"), torch.empty(10, 8)
    sizes = by.calculate_shard_sizes_and_offsets
    return [
        sizes(table, 4, 2, "row_wise"),
        sizes(table, 4, 2, "column_wise", 4),
        sizes(table, 4, 2, "table_wise"),
        sizes(table, 4, 2, "table_row_wise"),
        [by.placement("cuda", 5, 4), by.placement("cpu", 1, 4)],
    ]


@case("6/comm.get_local_size")
def local_ranks(rec: Package) -> Any:
    home = rec("distributed.comm")
    kept = {name: os.environ.pop(name, None) for name in ("LOCAL_WORLD_SIZE", "LOCAL_RANK")}
    try:
        free = [[home.get_local_size(world), home.get_local_rank(world, 5)] for world in (4, 8, 16, 12)]
        os.environ["LOCAL_WORLD_SIZE"], os.environ["LOCAL_RANK"] = "2", "1"
        return [free, home.get_local_size(4), home.get_local_size(3), home.get_local_rank(4, 2)]
    finally:
        for name, value in kept.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


@case("6/fbgemm_qcomm_codec.CommType")
def qcomms(rec: Package) -> Any:
    home = rec("distributed.fbgemm_qcomm_codec")
    config = home.QCommsConfig(home.CommType.FP16, home.CommType.BF16)
    plain = home.QCommsConfig()
    return [
        [member.name for member in home.CommType],
        [config.forward_precision.name, config.backward_precision.name, config.backward_loss_scale],
        [plain.forward_precision.name, plain.fp8_quantize_dim],
    ]


@case("6/shard.shard")
def sharded(rec: Package) -> Any:
    by = rec("distributed.sharding_plan")
    shard = rec("distributed.shard").shard
    with one_rank():
        out = []
        for plan in (by.table_wise(0), {"t": by.table_wise(0), "u": by.data_parallel()}):
            ebc = fill(bags(rec, "cpu"))
            weights = {name: value.clone() for name, value in ebc.state_dict().items()}
            twin = shard(ebc, plan, device=torch.device("cpu"))
            twin.load_state_dict(weights)
            out.append(twin(kjt(rec)).wait().values())
    return out


@case("6/shard.shard_modules")
def sharded_modules(rec: Package) -> Any:
    with one_rank():
        model = torch.nn.ModuleDict({"ebc": bags(rec, "cpu"), "over": torch.nn.Linear(2, 2)})
        twin = rec("distributed.shard").shard_modules(model, device=torch.device("cpu"))
        return [twin is model, type(model["ebc"]).__name__, type(model["over"]).__name__]


@case("6/module")
def parallel_facts(rec: Package) -> Any:
    with one_rank():
        model = torch.nn.ModuleDict({"ebc": bags(rec, "cpu"), "over": torch.nn.Linear(2, 2)})
        parallel = rec("distributed.model_parallel").DistributedModelParallel(model, device=torch.device("cpu"))
        keys = sorted(parallel.state_dict())
        return [keys, parallel.device, list(parallel.plan.plan), isinstance(parallel.module, torch.nn.ModuleDict)]


@case("5/ShardingType")
def kinds(rec: Package) -> Any:
    return [(member.name, member.value) for member in rec("distributed.types").ShardingType]


@case("5/ShardingEnv")
def environments(rec: Package) -> Any:
    home = rec("distributed.types").ShardingEnv
    local = home.from_local(4, 2)
    with one_rank():
        whole = home.from_process_group(dist.group.WORLD)
        return [[local.world_size, local.rank, local.process_group], [whole.world_size, whole.rank]]


@case("5/embedding_types.EmbeddingComputeKernel")
def kernels(rec: Package) -> Any:
    home = rec("distributed.embedding_types").EmbeddingComputeKernel
    return [home(name).value for name in ("dense", "fused", "fused_uvm", "fused_uvm_caching")]


@case("0/torchrec.distributed")
def top_level_distributed(rec: Package) -> Any:
    home = rec("distributed")
    names = "Awaitable NoWait ModuleSharder ParameterSharding ShardingEnv DistributedModelParallel TrainPipelineBase "
    names += "TrainPipelineSparseDist PrefetchTrainPipelineSparseDist EvalPipelineSparseDist TrainPipeline"
    functions = ("get_local_rank", "get_local_size", "get_unsharded_module_names")
    return [
        [isinstance(getattr(home, n), type) for n in names.split()],
        [callable(getattr(home, n)) for n in functions],
    ]


def trained(rec: Package, kind: str, sharder: Any = None, optimizer: Any = torch.optim.SGD) -> Any:
    """A collection under a plan of one kind, with given weights, and what it was made of."""
    by = rec("distributed.sharding_plan")
    ebc = fill(bags(rec, "cpu"))
    weights = {f"ebc.{name}": value.clone() for name, value in ebc.state_dict().items()}
    rec.optim.apply_optimizer_in_backward(optimizer, ebc.parameters(), {"lr": 0.1})
    generator = {"table_wise": by.table_wise(0), "data_parallel": by.data_parallel()}[kind]
    tables_plan = by.construct_module_sharding_plan(ebc, {"t": generator, "u": generator}, sharder, 1, 1, "cpu")
    model = torch.nn.ModuleDict({"ebc": ebc, "over": torch.nn.Linear(2, 2)})
    plan = rec("distributed.types").ShardingPlan({"ebc": tables_plan})
    home = rec("distributed.model_parallel")
    parallel = home.DistributedModelParallel(model, None, torch.device("cpu"), plan, [sharder] if sharder else None)
    return parallel, weights


@case("6/model_parallel.DistributedModelParallel")
def parallel_by_position(rec: Package) -> Any:
    with one_rank():
        model, weights = trained(rec, "table_wise")
        model.load_state_dict({**model.state_dict(), **weights})
        out = model.module["ebc"](kjt(rec)).wait().values()
        out.sum().backward()
        return [out, sorted(model.state_dict())]


@case(
    "6/model_parallel.DistributedModelParallel",
    "a model without a collection is refused: DistributedDataParallel serves it",
)
def parallel_without_tables(rec: Package) -> Any:
    with one_rank():
        plan = rec("distributed.types").ShardingPlan({})
        home = rec("distributed.model_parallel")
        home.DistributedModelParallel(bags(rec, "cpu"), device=torch.device("cpu"), plan=plan)
        return True


@case("6/state_dict")
def parallel_state(rec: Package) -> Any:
    with one_rank():
        model, weights = trained(rec, "table_wise")
        model.load_state_dict({**model.state_dict(), **weights})
        state = model.state_dict()
        replicated, _ = trained(rec, "data_parallel")
        kinds = [type(value).__name__ for name, value in replicated.state_dict().items() if name.startswith("ebc")]
        return [sorted(state), whole(state["ebc.embedding_bags.t.weight"]), sorted(set(kinds))]


@case("6/state_dict", "on one rank a table is a plain tensor: it is whole; on several it is a ShardedTensor, as there")
def parallel_state_of_one_rank(rec: Package) -> Any:
    with one_rank():
        model, _ = trained(rec, "table_wise")
        return type(model.state_dict()["ebc.embedding_bags.t.weight"]).__name__


@case("6/load_state_dict")
def parallel_loading(rec: Package) -> Any:
    with one_rank():
        model, weights = trained(rec, "table_wise")
        other, _ = trained(rec, "table_wise")
        model.load_state_dict({**model.state_dict(), **weights})
        other.load_state_dict(model.state_dict())
        return whole(other.state_dict()["ebc.embedding_bags.u.weight"])


@case("6/named_parameters")
def parallel_parameters(rec: Package) -> Any:
    with one_rank():
        model, _ = trained(rec, "table_wise")
        return [sorted(name for name, _ in model.named_parameters()), [name for name, _ in model.named_buffers()]]


@case("6/sparse_grad_parameter_names")
def sparse_gradients(rec: Package) -> Any:
    with one_rank():
        model, _ = trained(rec, "table_wise")
        return sorted(model.sparse_grad_parameter_names())


@case("6/embeddingbag.EmbeddingBagCollectionSharder")
def bag_sharder(rec: Package) -> Any:
    sharder = rec("distributed.embeddingbag").EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.3})
    return [
        sharder.module_type is rec.EmbeddingBagCollection,
        sorted(sharder.shardable_parameters(bags(rec))),
        attempt(lambda: sharder.sharding_types("cpu") and None),
    ]


@case("6/embedding.EmbeddingCollectionSharder")
def sequence_sharder(rec: Package) -> Any:
    sharder = rec("distributed.embedding").EmbeddingCollectionSharder({"learning_rate": 0.3}, None, False)
    ec = rec.EmbeddingCollection(tables=tables(rec, "EmbeddingConfig"), device=torch.device("meta"))
    return [sharder.module_type is rec.EmbeddingCollection, sorted(sharder.shardable_parameters(ec))]


@case("6/sharded output")
def lazy_outputs(rec: Package) -> Any:
    with one_rank():
        model, weights = trained(rec, "table_wise")
        model.load_state_dict({**model.state_dict(), **weights})
        out = model.module["ebc"](kjt(rec))
        return [out.keys(), out["a@t" if "a@t" in out.keys() else "a"], out.values(), torch.relu(out.values())]


@case("6/fused optimizer")
def fused_state(rec: Package) -> Any:
    with one_rank():
        model, weights = trained(rec, "table_wise", optimizer=rec.optim.RowWiseAdagrad)
        model.load_state_dict({**model.state_dict(), **weights})
        (model.module["ebc"](kjt(rec)).wait().values() * 0.5).sum().backward()
        named = model.fused_optimizer.state_dict()["state"]
        state = {name: {key: whole(value) for key, value in each.items()} for name, each in named.items()}
        rates = sorted({group["lr"] for group in model.fused_optimizer.param_groups})
        return [
            state,
            whole(model.state_dict()["ebc.embedding_bags.t.weight"]),
            rates,
            sorted(model.fused_optimizer.params),
        ]


@case("5/ShardingPlan")
def plans(rec: Package) -> Any:
    by = rec("distributed.sharding_plan")
    tables_plan = by.construct_module_sharding_plan(
        bags(rec), {"t": by.table_wise(1), "u": by.row_wise()}, local_size=2, world_size=2, device_type="cpu"
    )
    plan = rec("distributed.types").ShardingPlan(plan={"ebc": tables_plan})
    return [str(plan).split(), plan.get_plan_for_module("ebc") is tables_plan, plan.get_plan_for_module("no")]


@case("5/EmbeddingModuleShardingPlan")
def module_plans(rec: Package) -> Any:
    by = rec("distributed.sharding_plan")
    tables_plan = by.construct_module_sharding_plan(
        bags(rec), {"t": by.table_wise(1), "u": by.row_wise()}, local_size=2, world_size=2, device_type="cpu"
    )
    kind = rec("distributed.types").EmbeddingModuleShardingPlan
    return [isinstance(tables_plan, kind), isinstance(tables_plan, dict), str(tables_plan).split(), sorted(tables_plan)]


@case("5/LazyAwaitable")
def lazy(rec: Package) -> Any:
    kind = rec("distributed.types").LazyAwaitable

    class Later(kind):  # type: ignore[misc, valid-type]
        def _wait_impl(self) -> torch.Tensor:
            return torch.arange(3.0)

    sums = [Later() + 1, 2 * Later(), -Later(), Later() - Later(), Later() > 1, Later() / 2]
    return [torch.relu(Later()), Later()[1], Later().shape, *sums]


@case("5/NoWait")
def no_wait(rec: Package) -> Any:
    home = rec("distributed.types")
    return [home.NoWait(3).wait(), isinstance(home.NoWait(3), home.Awaitable)]


@case("5/ModuleSharder")
def own_sharder(rec: Package) -> Any:
    home = rec("distributed.types").ModuleSharder
    return [hasattr(home, name) for name in ("shard", "shardable_parameters", "sharding_types", "compute_kernels")]
