"""Cases of 2D parallelism, on one gloo rank: what is called how, and a group without replicas."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.distributed as dist

from tests.torchrec.case import Cases
from tests.torchrec.cases_distributed import bags, kjt, one_rank
from tests.torchrec.package import Package

CASES = case = Cases()


@case("6/model_parallel.DMPCollection")
def arguments(rec: Package) -> Any:
    taken = inspect.signature(rec("distributed.model_parallel").DMPCollection).parameters.values()
    by_place = [p for p in taken if p.kind is p.POSITIONAL_OR_KEYWORD]
    return [(p.name, None if p.default is p.empty else str(p.default)) for p in by_place]


def collection(rec: Package) -> Any:
    by, home = rec("distributed.sharding_plan"), rec("distributed.model_parallel")
    model = torch.nn.ModuleDict({"ebc": bags(rec)})
    tables_plan = by.construct_module_sharding_plan(
        model["ebc"], {"t": by.table_wise(0), "u": by.table_wise(0)}, local_size=1, world_size=1, device_type="cpu"
    )
    plan = rec("distributed.types").ShardingPlan(plan={"ebc": tables_plan})
    return home.DMPCollection(model, torch.device("cpu"), plan, 1, 1, dist.group.WORLD)


@case(
    "6/model_parallel.DMPCollection",
    "it works on CPUs too; TorchRec's `sync` needs a mean all-reduce, which gloo lacks",
)
def synchronised(rec: Package) -> Any:
    with one_rank():
        model = collection(rec)
        model.module["ebc"](kjt(rec)).wait().values().sum().backward()
        model.sync(include_optimizer_state=True)
        return isinstance(model, rec("distributed").DistributedModelParallel), sorted(model.state_dict())


@case("5/ShardingEnv2D")
def strategies(rec: Package) -> Any:
    home = rec("distributed.types")
    return [(member.name, member.value) for member in home.ShardingStrategy], issubclass(
        home.ShardingEnv2D, home.ShardingEnv
    )


@case(
    "5/ShardingEnv2D",
    "no DMPCollectionConfig: all collections have one group size; FULLY_SHARDED is refused: use larger groups",
)
def config(rec: Package) -> Any:
    return rec("distributed.types").DMPCollectionConfig.__name__
