"""Cases of the planner's arguments. Which plan is best is each package's own judgement."""

from __future__ import annotations

from typing import Any

import torch

from tests.torchrec.case import Cases
from tests.torchrec.cases_distributed import bags, one_rank, rectangles
from tests.torchrec.package import Package, attempt

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


@case("7/Topology")
def topology_by_name(rec: Package) -> Any:
    make = rec("distributed.planner").Topology
    one = make(world_size=4, compute_device="cuda", local_world_size=2, hbm_cap=2**30)
    return [one.world_size, one.compute_device, one.local_world_size, make(2, "cpu").local_world_size]


@case("7/Topology")
def topology_by_position(rec: Package) -> Any:
    one = rec("distributed.planner").Topology(4, "cuda", 2**34, 2**36, None, 2, None, 9e8, 5e7, 1e5, 3e7, 6e8, 1.3e7)
    rates = [one.hbm_mem_bw, one.hbm_to_ddr_mem_bw, one.intra_host_bw, one.inter_host_bw]
    return [one.world_size, one.local_world_size, rates]


@case("7/Topology")
def topology_of_unlike_ranks(rec: Package) -> Any:
    home = rec("distributed.planner.types")
    data = home.CustomTopologyData({"hbm_cap": [2**34, 2**34, 2**33, 2**33]}, 4)
    one = home.Topology(4, "cuda", ddr_cap=2**36, local_world_size=2, custom_topology_data=data)
    wrong = attempt(lambda: home.CustomTopologyData({"hbm_cap": [1]}, 2) and None)
    return [[d.storage.hbm for d in one.devices], data.has_data("ddr_cap"), data.get_data("hbm_cap"), wrong]


@case("7/Topology.devices")
def devices(rec: Package) -> Any:
    make = rec("distributed.planner").Topology
    gpus = make(2, "cuda", 2**34, 2**36, intra_host_bw=6e8, inter_host_bw=1e7)
    cpus = make(world_size=2, compute_device="cpu", ddr_cap=2**36)
    return [
        [[d.rank, d.storage.hbm, d.storage.ddr, d.perf.total] for d in gpus.devices],
        [[d.rank, d.storage.hbm, d.storage.ddr] for d in cpus.devices],
        [gpus.comms_bandwidths.intra_host_bw, gpus.comms_bandwidths.inter_host_bw],
    ]


@case("7/types.TopologyFactory.create_topology")
def from_factory(rec: Package) -> Any:
    home = rec("distributed.planner.types")
    trainer = home.TrainerConfig(world_size=4, local_world_size=2, hbm_cap_bytes=2**33)
    hardware = home.HardwareConfig(hbm_cap_bytes=2**34, ddr_cap_bytes=2**36, intra_host_bw=6e8, inter_host_bw=1e7)
    one = home.TopologyFactory.create_topology(
        trainer, hardware, home.KernelConfig("cuda", use_hardware_based_bandwidth=True)
    )
    facts = [one.world_size, one.local_world_size, one.compute_device, one.intra_host_bw, one.inter_host_bw]
    missing = attempt(lambda: home.TopologyFactory.create_topology(home.TrainerConfig()) and None)
    return [facts, one.devices[0].storage.hbm, one.devices[0].storage.ddr, missing]


@case("7/ParameterConstraints")
def all_constraints(rec: Package) -> Any:
    made = rec("distributed.planner.types").ParameterConstraints
    one = made(["row_wise"], None, None, [1.0], None, None, False, None, True, None, None, ["f"], None, "cuda")
    return [one.enforce_hbm, one.feature_names, one.device_group, one.use_virtual_table, made().key_value_params]


@case("7/storage_reservations.FixedPercentageStorageReservation")
def reserved_bytes(rec: Package) -> Any:
    home = rec("distributed.planner.storage_reservations")
    topology = rec("distributed.planner").Topology(2, "cuda", 2**34, 2**36)
    model = torch.nn.ModuleDict({"ebc": bags(rec)})
    sharders = rec("distributed.model_parallel").get_default_sharders()
    left = []
    for one in (
        home.FixedPercentageStorageReservation(0.25),
        home.FixedAbsoluteStorageReservation(2**30),
        home.FixedAbsoluteStorageReservation.from_gb(3),
    ):
        kept = one.reserve(topology, 64, model, sharders)
        left.append([[device.storage.hbm for device in kept.devices], one.last_reserved_topology is not None])
    negative = attempt(lambda: home.FixedAbsoluteStorageReservation(-1) and None)
    return [left, topology.devices[0].storage.hbm, negative]


# -- parts that are passed by hand


def way(rec: Package, name: str, kind: str, shards: Any, kernel: str = "fused", **more: Any) -> Any:
    """A table's way to be sharded; of each shard (device bytes, ms)."""
    home = rec("distributed.planner.types")
    by = {"table_wise": "device", "column_wise": "device", "row_wise": "uniform", "data_parallel": "uniform"}
    by |= {"table_row_wise": "host", "table_column_wise": "host", "grid_shard": "multi_host"}
    return home.ShardingOption(
        name,
        torch.empty(10, 8, device="meta"),
        ("ebc", torch.nn.Module()),
        [1.0],
        64,
        kind,
        by[kind],
        kernel,
        [
            home.Shard([10, 4], [0, 4 * place], home.Storage(held, 10 * held), home.Perf(ms, 0.0, ms / 2, 0.0))
            for place, (held, ms) in enumerate(shards)
        ],
        **more,
    )


def space(rec: Package) -> list[Any]:
    gib = 2**30
    return [
        way(rec, "t", "table_wise", [(4 * gib, 8.0)]),
        way(rec, "t", "column_wise", [(2 * gib, 5.0), (2 * gib, 5.0)]),
        way(rec, "t", "row_wise", [(gib, 3.0)] * 4),
        way(rec, "u", "table_wise", [(gib, 2.0)]),
        way(rec, "u", "data_parallel", [(gib, 1.0)] * 4),
        way(rec, "v", "table_wise", [(3 * gib, 6.0)]),
        way(rec, "v", "row_wise", [(gib, 4.0)] * 4),
    ]


def machine(rec: Package, gib: float = 8) -> Any:
    return rec("distributed.planner").Topology(4, "cuda", int(gib * 2**30), 2**38, local_world_size=2)


def told(proposal: Any) -> Any:
    return proposal and [[option.name, option.sharding_type] for option in proposal]


def walked(proposer: Any, given: Any, topology: Any, ratings: Any = ()) -> list[Any]:
    proposer.load(given)
    out, ratings = [], list(ratings)
    while (proposal := proposer.propose()) is not None and len(out) < 60:
        out.append(told(proposal))
        proposer.feedback(bool(len(out) % 2), proposal, ratings.pop(0) if ratings else None, topology)
    return out


@case("7/proposers.GreedyProposer")
def proposers(rec: Package) -> Any:
    home = rec("distributed.planner.proposers")
    makes = [
        lambda: home.GreedyProposer(),
        lambda: home.GreedyProposer(use_depth=False),
        lambda: home.UniformProposer(),
        lambda: home.UniformProposer(False),
        lambda: home.GridSearchProposer(),
        lambda: home.GridSearchProposer(max_proposals=3),
        lambda: home.DynamicProgrammingProposer(),
        lambda: home.DynamicProgrammingProposer(5),
    ]
    out = [walked(make(), space(rec), machine(rec)) for make in makes]
    out.append(walked(home.GreedyProposer(True, 2), space(rec), machine(rec), [5.0, 6.0, 7.0, 8.0, 9.0]))
    return out


@case("7/proposers.GreedyProposer")
def proposals_listed(rec: Package) -> Any:
    home = rec("distributed.planner.proposers")
    given = [home.GreedyProposer(), home.UniformProposer()]
    return [told(proposal) for proposal in home.proposers_to_proposals_list(given, space(rec))]


def placed(rec: Package, partitioner: Any, proposal: Any, gib: float = 8) -> Any:
    def run() -> Any:
        return [option.get_shards_assignment() for option in partitioner.partition(proposal, machine(rec, gib))]

    return attempt(run)


def proposal_of(rec: Package, *places: int) -> list[Any]:
    ways = space(rec)
    return [ways[place] for place in places]


@case("7/partitioners.GreedyPerfPartitioner")
def partitions(rec: Package) -> Any:
    home = rec("distributed.planner.partitioners")
    gib = 2**30
    greedy, by_perf = home.GreedyPerfPartitioner(), home.GreedyPerfPartitioner(home.SortBy.PERF, True)
    many = [way(rec, f"t{n}", "table_wise", [(gib // (1 + n % 3), 1.0 + n * 7 % 5)]) for n in range(9)]
    again = [way(rec, f"t{n}", "table_wise", [(gib // (1 + n % 3), 1.0 + n * 7 % 5)]) for n in range(9)]
    host = [
        way(rec, "h", "table_row_wise", [(gib, 2.0)] * 2),
        way(rec, "g", "grid_shard", [(gib, 1.0)] * 4),
        way(rec, "c", "table_column_wise", [(gib, 1.0)] * 3),
        way(rec, "w", "table_wise", [(gib, 3.0)]),
    ]
    together = [
        way(rec, "a", "table_row_wise", [(gib, 2.0)] * 2, dependency="both"),
        way(rec, "b", "table_row_wise", [(gib, 1.0)] * 2, dependency="both"),
    ]
    return [
        placed(rec, greedy, proposal_of(rec, 0, 3, 5)),
        placed(rec, greedy, proposal_of(rec, 1, 4, 6)),
        placed(rec, by_perf, proposal_of(rec, 2, 3, 5)),
        [placed(rec, greedy, many), placed(rec, by_perf, again)],
        [placed(rec, greedy, host), placed(rec, greedy, together)],
        placed(rec, greedy, proposal_of(rec, 0, 3, 5), 3.5),
        [member.value for member in home.SortBy],
    ]


@case("7/partitioners.GreedyPerfPartitioner")
def balanced(rec: Package) -> Any:
    make = rec("distributed.planner.partitioners").MemoryBalancedPartitioner
    gib = 2**30
    out = []
    for settings in ((), (4, 0.5), (10, 1.0, True)):
        tables = [way(rec, f"t{n}", "table_wise", [(gib * (1 + n % 3), 1.0 + n * 7 % 5)]) for n in range(7)]
        out.append(placed(rec, make(*settings), tables))
    return out


@case("7/perf_models.NoopPerfModel")
def rated(rec: Package) -> Any:
    home, topology = rec("distributed.planner.perf_models"), machine(rec)
    plan = (
        rec("distributed.planner.partitioners").GreedyPerfPartitioner().partition(proposal_of(rec, 1, 4, 5), topology)
    )
    return [home.NoopPerfModel(topology).rate(plan), home.NoopStorageModel(topology).rate(plan)]


@case("7/types")
def facts_of_parts(rec: Package) -> Any:
    home = rec("distributed.planner.types")
    some, more = home.Perf(1.0, 2.0, 3.0, 4.0, 5.0, 6.0), home.Storage(3, 4)
    option = space(rec)[1]
    device = home.DeviceHardware(1, more, some)
    error = home.PlannerError("no", home.PlannerErrorType.PARTITION)
    bases = "StorageReservation PerfModel ShardEstimator Enumerator Proposer Partitioner Stats PlanLoader"
    return [
        [some.total, (some + some).total, (some + some).input_dist_comms],
        [(more + more).ddr, (more - more).hbm, more.fits_in(home.Storage(3, 5)), more.fits_in(home.Storage(2, 5))],
        [more < home.Storage(4, 0), home.Shard([1], [0]) == home.Shard([1], [0]), device.rank],
        [option.fqn, option.path, option.num_shards, option.num_inputs, option.total_perf, option.total_storage.hbm],
        [option.is_pooled, option.cache_load_factor, option.get_shards_assignment(), option.tensor.shape],
        [(member.name, member.value) for kind in (home.PartitionByType, home.PlannerErrorType) for member in kind],
        [error.error_type.value, str(error)],
        [attempt(lambda name=name: getattr(home, name)() and None) for name in bases.split()],
    ]


@case("7/constants.*")
def constants(rec: Package) -> Any:
    home, tools = rec("distributed.planner.constants"), rec("distributed.planner.utils")
    names = (
        "BATCH_SIZE HBM_CAP DDR_CAP SSD_CAP HBM_MEM_BW DDR_MEM_BW SSD_MEM_BW HBM_TO_DDR_MEM_BW INTRA_NODE_BANDWIDTH "
    )
    names += "CROSS_NODE_BANDWIDTH MIN_CW_DIM POOLING_FACTOR NUM_POOLINGS BIGINT_DTYPE UVM_CACHING_RATIO "
    names += "KV_CACHING_RATIO BWD_COMPUTE_MULTIPLIER WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER MAX_SIZE"
    return [
        {name: getattr(home, name) for name in names.split()},
        [tools.bytes_to_gb(2**31), tools.bytes_to_mb(2**20), tools.sharder_name(torch.nn.Linear)],
    ]


@case("7/enumerators.EmbeddingEnumerator")
def enumerated(rec: Package) -> Any:
    home = rec("distributed.planner")
    make = rec("distributed.planner.types").ParameterConstraints
    sharders = rec("distributed.model_parallel").get_default_sharders()
    model = torch.nn.ModuleDict({"ebc": bags(rec)})
    topology = home.Topology(2, "cuda", 2**34, 2**36, local_world_size=2)
    out = []
    for kind in ("table_wise", "row_wise", "data_parallel", "table_row_wise"):
        kernel = "dense" if kind == "data_parallel" else "fused"
        told = {name: make(sharding_types=[kind], compute_kernels=[kernel]) for name in "tu"}
        enumerator = rec("distributed.planner.enumerators").EmbeddingEnumerator(topology, 64, constraints=told)
        for option in enumerator.enumerate(model, sharders):
            shapes = [[list(shard.size), list(shard.offset)] for shard in option.shards]
            facts = [option.name, option.path, option.sharding_type, option.partition_by, option.compute_kernel]
            sane = all(s.perf.total > 0 and s.storage.hbm > 0 for s in option.shards)
            out.append([facts, shapes, sane, option.is_pooled, option.batch_size, option.num_inputs])
    return sorted(out, key=str)


@case("7/shard_estimators.EmbeddingPerfEstimator")
def estimators(rec: Package) -> Any:
    home, types = rec("distributed.planner.shard_estimators"), rec("distributed.planner.types")
    topology = machine(rec)
    given = [home.EmbeddingPerfEstimator(topology, {}), home.EmbeddingStorageEstimator(topology=topology)]
    return [isinstance(each, types.ShardEstimator) for each in given]


@case("7/enumerators.EmbeddingEnumerator")
def planned_with_parts(rec: Package) -> Any:
    parts = {
        "enumerator": rec("distributed.planner.enumerators").EmbeddingEnumerator,
        "proposer": rec("distributed.planner.proposers").GreedyProposer(),
        "partitioner": rec("distributed.planner.partitioners").GreedyPerfPartitioner(),
    }
    home = rec("distributed.planner")
    make = rec("distributed.planner.types").ParameterConstraints
    model = torch.nn.ModuleDict({"ebc": bags(rec)})
    sharders = rec("distributed.model_parallel").get_default_sharders()
    out = []
    for kinds in (["table_wise"], ["column_wise"], ["data_parallel"]):
        told = {name: make(sharding_types=kinds) for name in "tu"}
        topology = home.Topology(2, "cpu")
        kinds_of = {"enumerator": parts["enumerator"](topology, 64, told)}
        planner = home.EmbeddingShardingPlanner(topology, 64, **{**parts, **kinds_of}, constraints=told)
        plan = planner.plan(model, sharders).plan["ebc"]
        out.append({name: [p.sharding_type, len(p.ranks)] for name, p in sorted(plan.items())})
    return out


@case("7/stats.EmbeddingStats")
def planner_that_tells(rec: Package) -> Any:
    types, home = rec("distributed.planner.types"), rec("distributed.planner.stats")
    seen: list[Any] = []

    class Telling(types.Stats):  # type: ignore[misc, name-defined]
        def log(self, sharding_plan: Any, topology: Any, batch_size: int, *args: Any, **more: Any) -> None:
            seen.append([sorted(sharding_plan.plan), topology.world_size, batch_size])

    quiet = home.NoopEmbeddingStats()
    return [
        planned(rec, "table_wise", stats=[Telling(), quiet]),
        seen,
        isinstance(quiet, types.Stats),
        issubclass(home.EmbeddingStats, types.Stats),
    ]


@case("7/EmbeddingPlannerBase")
def converted(rec: Package) -> Any:
    home = rec("distributed.planner.planners")
    topology = machine(rec)
    options = (
        rec("distributed.planner.partitioners").GreedyPerfPartitioner().partition(proposal_of(rec, 1, 4, 5), topology)
    )
    plan = home.to_sharding_plan(options, topology).plan["ebc"]
    return [
        {name: [p.sharding_type, p.compute_kernel, p.ranks, rectangles(p)] for name, p in sorted(plan.items())},
        issubclass(home.EmbeddingShardingPlanner, home.EmbeddingPlannerBase),
    ]


@case("7/plan#2")
def failures(rec: Package) -> Any:
    home, types = rec("distributed.planner"), rec("distributed.planner.types")
    model = torch.nn.ModuleDict({"ebc": bags(rec)})
    sharders = rec("distributed.model_parallel").get_default_sharders()
    planner = home.EmbeddingShardingPlanner(home.Topology(2, "cuda", hbm_cap=1, ddr_cap=1), 64)
    try:
        planner.plan(model, sharders)
    except types.PlannerError as error:
        found = isinstance(error.error_type, types.PlannerErrorType)
    constraint = {"t": types.ParameterConstraints(sharding_types=["row_wise"], compute_kernels=["quant"])}
    other = home.EmbeddingShardingPlanner(home.Topology(2, "cuda"), 64, constraints=constraint)
    return [found, attempt(lambda: other.plan(model, sharders) and None)]


@case("7/plan#2", "a constraint for an unknown table is refused: it would have no effect")
def constraint_without_a_table(rec: Package) -> Any:
    home, types = rec("distributed.planner"), rec("distributed.planner.types")
    planner = home.EmbeddingShardingPlanner(
        home.Topology(2, "cpu"), 64, constraints={"x": types.ParameterConstraints()}
    )
    model = torch.nn.ModuleDict({"ebc": bags(rec)})
    return sorted(planner.plan(model, rec("distributed.model_parallel").get_default_sharders()).plan)
