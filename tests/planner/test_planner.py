"""The planner as the tutorials use it, its constraints, and what it says when they cannot be met."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayrec.distributed import CacheParams, ShardingPlan, ShardingType
from rayrec.distributed.ids.routes import PlannedTable, make_routes
from rayrec.distributed.kernel import pooling_group, vector_group
from rayrec.distributed.planner import (
    EmbeddingShardingPlanner,
    NoPlanError,
    ParameterConstraints,
    Topology,
    plan_tables,
)
from rayrec.distributed.planner.cost.seconds import shard_cost
from rayrec.distributed.planner.cost.terms import ShardBytes
from rayrec.distributed.planner.search.solve import fits
from tests.planner.problems import KINDS, SHARDER, collection, drawn, table
from tests.ranks import Ranks

LARGE_AND_SMALL = [
    table(f"{size}_table_{n}", rows) for size, rows in (("large", 4096), ("small", 1024)) for n in (0, 1)
]


def planned(tables, topology, told=None, module=None):
    planner = EmbeddingShardingPlanner(topology=topology, constraints=told)
    return planner.plan(module or collection(tables), [SHARDER])


def test_two_tables_on_one_rank_print_as_in_the_tutorial():
    plan = planned([table("product_table", 4096), table("user_table", 4096)], Topology(1, "cuda"))
    text = str(plan)
    assert "product_table | table_wise    | fused          | [0]" in text
    assert "user_table    | [0, 0]        | [4096, 64]  | rank:0/cuda:0" in text


def test_devices_are_numbered_from_0_on_every_host():
    told = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    on_gpus = planned([table("t", 4096)], Topology(4, "cuda", local_world_size=2), told)
    by_row = on_gpus.plan[""]["t"]
    assert [by_row.placement(s) for s in by_row.shards] == [
        "rank:0/cuda:0", "rank:1/cuda:1", "rank:2/cuda:0", "rank:3/cuda:1"
    ]  # fmt: skip
    assert ShardingPlan.from_json(on_gpus.to_json()) == on_gpus
    on_cpus = planned([table("t", 4096)], Topology(4, "cpu", local_world_size=2), told)
    by_row = on_cpus.plan[""]["t"]
    assert [by_row.placement(s) for s in by_row.shards] == [f"rank:{rank}/cpu" for rank in range(4)]
    assert not by_row.local_ranks


def test_each_rank_gets_a_large_and_a_small_table():
    told = {
        t.name: ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["batched_fused"])
        for t in LARGE_AND_SMALL
    }
    tables = planned(LARGE_AND_SMALL, Topology(world_size=2, compute_device="cuda"), told).plan[""]
    assert {name: p.ranks for name, p in tables.items()} == {
        "large_table_0": [0],
        "large_table_1": [1],
        "small_table_0": [0],
        "small_table_1": [1],
    }
    assert {p.compute_kernel for p in tables.values()} == {"fused"}


@pytest.mark.parametrize("kind", KINDS)
def test_every_sharding_type_can_be_asked_for(kind: str):
    told = {t.name: ParameterConstraints(sharding_types=[kind]) for t in LARGE_AND_SMALL}
    tables = planned(LARGE_AND_SMALL, Topology(4, "cpu", local_world_size=2), told).plan[""]
    assert {p.sharding_type for p in tables.values()} == {kind}
    if kind in ("row_wise", "data_parallel"):
        assert all(p.ranks == [0, 1, 2, 3] for p in tables.values())
    if kind in ("table_row_wise", "table_column_wise"):
        assert all(p.ranks in ([0, 1], [2, 3]) for p in tables.values())


def test_tables_cut_by_columns_in_a_host_share_the_hosts_also_where_each_fills_one():
    """Half a table is what a rank has room for."""
    told = {name: ParameterConstraints(sharding_types=["table_column_wise"]) for name in "ab"}
    topology = Topology(4, "cpu", local_world_size=2, ddr_cap=1 << 30)
    large = [table(name, 1 << 23, dim=32) for name in told]
    tables = planned(large, topology, told).plan[""]
    assert sorted(sharding.ranks for sharding in tables.values()) == [[0, 1], [2, 3]]


def test_collections_anywhere_in_the_model_are_planned():
    module = nn.ModuleDict(
        {"sparse": nn.ModuleDict({"user": collection([table("a")]), "item": collection([table("a"), table("b")])})}
    )
    plan = planned([], Topology(2, "cpu"), module=module)
    assert {path: list(tables) for path, tables in plan.plan.items()} == {
        "sparse.user": ["a"],
        "sparse.item": ["a", "b"],
    }


def test_model_without_collections_is_refused():
    with pytest.raises(ValueError, match=r"Linear holds no module that the sharders \(EmbeddingBagCollection\)"):
        planned([], Topology(2, "cpu"), module=nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("told", "message"),
    [
        ({"tt": ParameterConstraints()}, "table 'tt', which the model does not have; did you mean 't'"),
        ({"t": ParameterConstraints(sharding_types=["row_wis"])}, "'row_wis' does not exist on cpu; allowed: data_par"),
        ({"t": ParameterConstraints(compute_kernels=["fused_uvm"])}, "'fused_uvm' cannot run on cpu; allowed: fused"),
        ({"t": ParameterConstraints(min_partition=10)}, "min_partition=10 must be a multiple of 4"),
        ({"t": ParameterConstraints(pooling_factors=[1, 2])}, "pooling_factors has 2 numbers for 1 features"),
        ({"t": ParameterConstraints(pooling_factors=[-1])}, "must be finite and not negative"),
        ({"t": ParameterConstraints(device_group=[])}, r"device_group \[\] must name ranks of 0 .. 3"),
        ({"t": ParameterConstraints(min_partition=68)}, "min_partition=68 must be .* embedding_dim=64"),
        ({"t": ParameterConstraints(device_group=[0, 9])}, "must name ranks of 0 .. 3"),
        ({"t": ParameterConstraints(device_group="cuda")}, "the topology has 'cpu' devices only"),
        (
            {"t": ParameterConstraints(device_group=[0, 1], sharding_types=["data_parallel"])},
            r"ranks \[0, 1\]; what can run",
        ),
    ],
)
def test_wrong_constraints_name_the_table_and_the_fix(told, message: str):
    with pytest.raises(ValueError, match=message):
        planned([table("t")], Topology(4, "cpu"), told)


def test_device_group_and_min_partition_hold():
    told = {
        "t": ParameterConstraints(device_group=[1, 3], sharding_types=["column_wise"], min_partition=32),
        "u": ParameterConstraints(device_group=[2]),
    }
    tables = planned([table("t", dim=128), table("u")], Topology(4, "cpu"), told).plan[""]
    assert tables["t"].ranks == [1, 3]
    assert min(shard.cols.size for shard in tables["t"].shards) >= 32
    assert tables["u"].ranks == [2]


def test_tables_optimizer_decides_its_state_bytes():
    module = collection([table("a"), table("b")])
    weight = module.embedding_bags["b"].weight
    weight._optimizer_classes, weight._optimizer_kwargs = [torch.optim.Adagrad], [{"lr": 0.1}]
    result = EmbeddingShardingPlanner(topology=Topology(1, "cpu")).result(module, [SHARDER])
    assert [t.state_bytes for t in result.tables] == [1000 * 4, 1000 * 64 * 4]


def test_dense_kernels_are_taken_only_where_asked_for():
    for device in ("cpu", "cuda"):
        for kind in KINDS:
            told = {
                "a": ParameterConstraints(sharding_types=[kind], compute_kernels=["batched_dense"]),
                "b": ParameterConstraints(sharding_types=[kind]),
            }
            plan = planned([table("a"), table("b")], Topology(2, device), told).plan[""]
            assert (plan["a"].compute_kernel, plan["b"].compute_kernel) == ("dense", "fused"), kind


def test_a_dense_kernel_costs_its_gradient_two_moments_and_a_pass_over_all_rows():
    tables, told = [table("a", 1_000_000)], {"a": ParameterConstraints(compute_kernels=["dense"])}
    dense = plan_tables(tables, Topology(1, "cpu"), told, sharder=SHARDER).estimate
    fused = plan_tables(tables, Topology(1, "cpu"), sharder=SHARDER).estimate
    terms = dict(zip(ShardBytes._fields, dense.storage_RT[0] - fused.storage_RT[0], strict=True))
    weights, row_state = 1_000_000 * 64 * 4, 1_000_000 * 4
    assert terms == {
        "weights": 0, "optimizer": 2 * weights - row_state, "gradients": weights, "ids": 0, "vectors": 0, "cache": 0,
        "host": 0,
    }  # fmt: skip
    assert dense.worst_s > 10 * fused.worst_s


def test_the_share_of_a_cache_goes_from_the_constraint_to_the_kernels_tables():
    topology = Topology(2, "cuda", hbm_cap=1 << 30, ddr_cap=1 << 34)
    names, caches = ("a", "b", "c"), (CacheParams(load_factor=0.3), CacheParams(load_factor=0.03), None)
    told = {
        name: ParameterConstraints(
            sharding_types=["table_wise"], compute_kernels=["fused_uvm_caching"], cache_params=cache, device_group=[1]
        )
        for name, cache in zip(names, caches, strict=True)
    }
    tables = [table(name) for name in names]
    result = plan_tables(tables, topology, told, sharder=SHARDER)
    plan = ShardingPlan.from_json(result.plan.to_json())
    assert plan == result.plan
    assert [plan.plan[""][name].load_factor for name in names] == [0.3, 0.03, 1.0]  # the last is grown
    planned = [PlannedTable(t, plan.plan[""][t.name], SHARDER.optimizer) for t in tables]
    routes = make_routes(planned, 2, lambda t: t.load_factor)
    assert [[t.load_factor for t in held] for held in routes.ranks[1].tables.values()] == [[0.3], [0.03], [1.0]]
    local = [held[0] for held in routes.ranks[1].tables.values()]
    for group in (pooling_group, vector_group):
        assert len({group(each, torch.device("cuda")) for each in local}) == 3  # a TBE has one share for all
    with pytest.raises(ValueError, match=r"table 'a': cache_params: load_factor=2.0 must be above 0 and at most 1"):
        ShardingPlan.from_json(result.plan.to_json().replace('"load_factor": 0.3', '"load_factor": 2.0'))


def test_tables_that_do_not_fit_go_to_host_memory_behind_a_cache():
    topology = Topology(2, "cuda", hbm_cap=1 << 30, ddr_cap=1 << 34)
    result = plan_tables([table("big", 12_000_000), table("small")], topology, batch_size=64, sharder=SHARDER)
    assert result.plan.plan[""]["big"].compute_kernel == "fused_uvm_caching"
    assert result.plan.plan[""]["small"].compute_kernel == "fused"
    assert 0.1 < result.plan.plan[""]["big"].load_factor < 0.7  # grown into what is left
    assert result.plan.plan[""]["small"].cache_params is None
    assert (result.estimate.device_bytes_R <= 1 << 30).all()


@pytest.mark.parametrize(
    ("tables", "topology", "told", "message"),
    [
        (
            [table("big", 40_000_000, 128), table("small")],
            Topology(2, "cpu", ddr_cap=16 << 30),
            {"big": ParameterConstraints(sharding_types=["table_wise"])},
            r"table 'big' \(40000000 x 128, 19.2 GiB with optimizer state\) needs at least 19.2 GiB on one rank.*"
            r"a rank has 14.4 GiB.*What would fit: allow 'big' every sharding type.*FP16 for 'big'",
        ),
        (
            [table(f"t{n}", 20_000_000, 128) for n in range(10)],
            Topology(2, "cpu", ddr_cap=16 << 30),
            {},
            r"all 10 tables need 96.* GiB .*2 ranks have 28.8 GiB.*largest: 't0' 9.6 GiB.*What would fit: .*ranks",
        ),
        (
            [table("big", 200_000_000, 128)],
            Topology(2, "cuda", hbm_cap=8 << 30, ddr_cap=8 << 30),
            {},
            r"16.0 GiB of it host memory.*largest: 'big' 96.1 GiB.*What would fit: 14 ranks",
        ),
    ],
)
def test_no_plan_names_bytes_and_what_would_fit(tables, topology, told, message: str):
    with pytest.raises(NoPlanError, match=message):
        plan_tables(tables, topology, told, sharder=SHARDER)


@pytest.mark.parametrize("seed", [0, 2, 5, 8, 14, 20, 25, 35])
def test_whether_anything_fits_is_known_without_the_search(seed: int):
    """Also where it fits only beside the devices."""
    listed, topology, told = drawn(seed)
    try:
        result = plan_tables(listed, topology, told, sharder=SHARDER)
    except NoPlanError:
        result = None
    roomy = Topology(topology.world_size, "cpu", hosts=[h.num_ranks for h in topology.hosts], ddr_cap=1 << 45)
    facts = plan_tables(listed, roomy, told, sharder=SHARDER).tables if result is None else result.tables
    assert fits(facts, topology, 0) == (result is not None)


def _collective(group, tables, told):
    planner = EmbeddingShardingPlanner(topology=Topology(group.size(), "cpu"), constraints=told)
    try:
        return planner.collective_plan(collection(tables), [SHARDER], group).to_json()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def test_collective_plan_is_one_plan_or_one_error_on_all_ranks():
    ranks = Ranks(2)
    try:
        good = ranks.run(_collective, LARGE_AND_SMALL, {})
        bad = ranks.run(_collective, LARGE_AND_SMALL, {"nope": ParameterConstraints()})
    finally:
        ranks.close()
    assert good[0] == good[1] == planned(LARGE_AND_SMALL, Topology(2, "cpu")).to_json()
    assert bad[0] == bad[1]
    assert "'nope'" in bad[0]


def test_sharding_types_may_be_enums():
    told = {"t": ParameterConstraints(sharding_types=[ShardingType.ROW_WISE])}
    assert planned([table("t")], Topology(2, "cpu"), told).plan[""]["t"].sharding_type == "row_wise"


def test_row_blocks_of_one_host_meet_before_they_leave_it():
    alike, unlike = Topology.from_world("2x4", "h100"), Topology(8, hosts=[5, 3], gpu="h100")
    (planned,) = plan_tables([table("a", 1000, 64)], alike, sharder=SHARDER).tables
    whole = shard_cost(planned, "table_wise", "fused", (1000, 64), 4, alike)
    block = shard_cost(planned, "table_row_wise", "fused", (250, 64), 4, alike)
    assert (block.output_inter, block.gradient_inter) == pytest.approx((whole.output_inter / 4,) * 2)
    assert block.output_intra > whole.output_intra  # all of it meets, also what is for other hosts
    flat = shard_cost(planned, "table_row_wise", "fused", (200, 64), 5, unlike)
    assert flat.output_inter == shard_cost(planned, "table_wise", "fused", (1000, 64), 5, unlike).output_inter
