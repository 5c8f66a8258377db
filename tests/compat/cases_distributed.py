"""Cases of plans, sharding and what is around them, on one gloo rank."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from tests.compat.case import Cases
from tests.compat.cases_modules import fill, kjt, tables
from tests.compat.package import Package, attempt

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
    """(offsets, sizes, placement) of every shard, whatever the plan's own form."""
    if hasattr(sharding, "shards"):
        shards = [([s.rows.start, s.cols.start], list(s.shape), sharding.placement(s)) for s in sharding.shards]
        return [] if sharding.replicated else shards
    spec = sharding.sharding_spec
    return [] if spec is None else [(s.shard_offsets, s.shard_sizes, str(s.placement)) for s in spec.shards]


def plan_of(rec: Package, first: Any, second: Any, world: int = 2, local: int = 2, device: str = "cpu") -> Any:
    home = rec("distributed.sharding_plan")
    plan = home.construct_module_sharding_plan(
        bags(rec), {"t": first, "u": second}, local_size=local, world_size=world, device_type=device
    )
    return {name: [p.sharding_type, p.compute_kernel, sorted(set(p.ranks)), rectangles(p)] for name, p in plan.items()}


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
