"""Cases of the planner's arguments. Which plan is best is each package's own judgement."""

from __future__ import annotations

from typing import Any

import torch

from tests.compat.case import Cases
from tests.compat.cases_distributed import bags, one_rank
from tests.compat.package import Package, attempt

CASES = case = Cases()


def planned(rec: Package, kind: str, **settings: Any) -> Any:
    home = rec("distributed.planner")
    constraints = rec("distributed.planner.types").ParameterConstraints
    fixed = {name: constraints([kind], ["fused"]) for name in "tu"}
    topology = home.Topology(world_size=2, compute_device="cpu")
    planner = home.EmbeddingShardingPlanner(topology, 64, constraints=fixed, **settings)
    plan = planner.plan(
        torch.nn.ModuleDict({"ebc": bags(rec)}), rec("distributed.model_parallel").get_default_sharders()
    )
    tables = plan.plan["ebc"]
    return {name: [p.sharding_type, p.compute_kernel] for name, p in sorted(tables.items())}


@case("7/EmbeddingShardingPlanner")
def planner_by_position(rec: Package) -> Any:
    return [planned(rec, "table_wise"), planned(rec, "table_wise", debug=False)]


@case("7/plan")
def planner_plan(rec: Package) -> Any:
    return planned(rec, "table_wise")


@case("7/collective_plan")
def planner_collective(rec: Package) -> Any:
    home = rec("distributed.planner")
    with one_rank():
        planner = home.EmbeddingShardingPlanner(topology=home.Topology(world_size=1, compute_device="cpu"))
        plan = planner.collective_plan(torch.nn.ModuleDict({"ebc": bags(rec)}))
        return [list(plan.plan), sorted(plan.get_plan_for_module("ebc")), plan.get_plan_for_module("no")]


@case("7/storage_reservations.HeuristicalStorageReservation")
def reservations(rec: Package) -> Any:
    home = rec("distributed.planner.storage_reservations")
    wrong = attempt(lambda: home.HeuristicalStorageReservation(percentage=1.5) and None)
    return [planned(rec, "table_wise", storage_reservation=home.HeuristicalStorageReservation(percentage=0.2)), wrong]


@case("7/storage_reservations.FixedPercentageStorageReservation")
def fixed_reservation(rec: Package) -> Any:
    home = rec("distributed.planner.storage_reservations")
    return planned(rec, "table_wise", storage_reservation=home.FixedPercentageStorageReservation(percentage=0.5))


@case("7/ParameterConstraints")
def constraints_by_position(rec: Package) -> Any:
    one = rec("distributed.planner.types").ParameterConstraints(["row_wise"], ["fused"], 8, [3.0], [1.0], [64], True)
    return [
        one.sharding_types,
        one.compute_kernels,
        one.min_partition,
        one.pooling_factors,
        one.batch_sizes,
        one.is_weighted,
    ]


@case("7/proposers.GreedyProposer", "not offered: the planner searches by a bound; the error says what to use")
def proposers(rec: Package) -> Any:
    return isinstance(rec("distributed.planner.proposers").GreedyProposer, type)


@case("7/Topology")
def topology_by_name(rec: Package) -> Any:
    make = rec("distributed.planner").Topology
    one = make(world_size=4, compute_device="cuda", local_world_size=2, hbm_cap=2**30)
    return [one.world_size, one.compute_device, one.local_world_size, make(2, "cpu").local_world_size]


@case("7/enumerators.EmbeddingEnumerator", "not offered: the planner searches by a bound; the error says what to use")
def enumerators(rec: Package) -> Any:
    return isinstance(rec("distributed.planner.enumerators").EmbeddingEnumerator, type)
