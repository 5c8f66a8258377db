"""The planner as the tutorials use it, its constraints, and what it says when they cannot be met."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.distributed import (
    CacheParams,
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbeddingComputeKernel,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.distributed.kernel import RULES, check_trainable
from rayrec.distributed.model_parallel import default_plan
from rayrec.distributed.plan.cuts import CUTS
from rayrec.distributed.planner import (
    EmbeddingShardingPlanner,
    NoPlanError,
    ParameterConstraints,
    PlanResult,
    Topology,
    check_plan,
    plan_tables,
)
from rayrec.modules import DataType, EmbeddingBagCollection, EmbeddingBagConfig
from tests.planner.problems import KINDS, SHARDER, collection, table
from tests.ranks import on_ranks

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
        ({"t": ParameterConstraints(min_partition=0)}, "min_partition=0 must be a multiple of 4"),
        ({"t": ParameterConstraints(min_partition=6)}, "min_partition=6 must be a multiple of 4"),
        ({"t": ParameterConstraints(pooling_factors=[1, 2])}, "pooling_factors has 2 numbers for 1 features"),
        (
            {"t": ParameterConstraints(pooling_factors=[-0.1])},
            r"pooling_factors=\[-0.1\] must be finite and not negative",
        ),
        ({"t": ParameterConstraints(pooling_factors=[float("nan")])}, r"pooling_factors=\[nan\] must be finite"),
        ({"t": ParameterConstraints(num_poolings=[1.0, 1.0])}, "num_poolings has 2 numbers for 1 features"),
        ({"t": ParameterConstraints(device_group=[])}, r"device_group \[\] must name ranks of 0 .. 3"),
        ({"t": ParameterConstraints(min_partition=68)}, "min_partition=68 must be .* embedding_dim=64"),
        ({"t": ParameterConstraints(device_group=[4])}, r"device_group \[4\] must name ranks of 0 .. 3"),
        ({"t": ParameterConstraints(device_group=[-1])}, r"device_group \[-1\] must name ranks of 0 .. 3"),
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


def test_the_share_of_a_cache_goes_from_the_constraint_to_the_plan():
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


def _collective(group, tables, told):
    planner = EmbeddingShardingPlanner(topology=Topology(group.size(), "cpu"), constraints=told)
    try:
        return planner.collective_plan(collection(tables), [SHARDER], group).to_json()
    except ValueError as error:
        return f"{type(error).__name__}: {error}"


def test_collective_plan_is_one_plan_or_one_error_on_all_ranks():
    good = on_ranks(2, _collective, LARGE_AND_SMALL, {})
    bad = on_ranks(2, _collective, LARGE_AND_SMALL, {"nope": ParameterConstraints()})
    assert good[0] == good[1] == planned(LARGE_AND_SMALL, Topology(2, "cpu")).to_json()
    assert bad[0] == bad[1]
    assert "'nope'" in bad[0]


def test_sharding_types_may_be_enums():
    told = {"t": ParameterConstraints(sharding_types=[ShardingType.ROW_WISE])}
    assert planned([table("t")], Topology(2, "cpu"), told).plan[""]["t"].sharding_type == "row_wise"


@pytest.mark.parametrize("batch_size", [0, -1, 1.5])
def test_batch_size_is_at_least_1(batch_size: Any) -> None:
    with pytest.raises(ValueError, match=f"batch_size={batch_size} must be at least 1"):
        EmbeddingShardingPlanner(batch_size=batch_size)
    model = nn.ModuleDict({"ebc": collection([table("t", 10, 64)])})
    assert EmbeddingShardingPlanner(Topology(2, "cpu"), 1).plan(model, [SHARDER]).plan.keys() == {"ebc"}


def test_what_is_not_sharded_is_held_five_times() -> None:
    layer = nn.Linear(3, 2)
    model = nn.ModuleDict({"ebc": collection([table("t")]), "a": layer, "b": layer, "c": nn.Linear(1, 1).half()})
    assert EmbeddingShardingPlanner(Topology(1, "cpu")).result(model, [SHARDER]).dense_bytes == 5 * (8 * 4 + 2 * 2)


class Outer(EmbeddingBagCollection):
    """A collection with one inside it."""

    def __init__(self) -> None:
        super().__init__([table("t")], device=torch.device("meta"))
        self.inner = collection([table("u")])


def test_what_is_inside_a_sharded_module_is_no_module_of_its_own() -> None:
    def paths(model: nn.Module) -> list[str]:
        return list(planned([], Topology(1, "cpu"), module=model).plan)

    assert paths(Outer()) == [""]
    assert paths(nn.ModuleDict({"a": Outer(), "ab": collection([table("u")]), "c": nn.Linear(1, 1)})) == ["a", "ab"]


def facts_of(**told: Any) -> Any:
    """A table of two features, ten examples a rank, four ranks, as the planner knows it."""
    constraints = {"t": ParameterConstraints(**told)}
    listed = [table("t", 100, 64, ["f0", "f1"])]
    return plan_tables(listed, Topology(4, "cpu"), constraints, batch_size=10, sharder=SHARDER).tables[0]


@pytest.mark.parametrize(
    ("told", "bags", "ids"),
    [
        ({}, 80, 80),
        ({"pooling_factors": [3.0]}, 80, 240),
        ({"num_poolings": [2.0, 1.0], "pooling_factors": [3.0, 0.5]}, 120, 260),
        ({"batch_sizes": [5, 1], "pooling_factors": [2.0, 3.0]}, 24, 52),
    ],
)
def test_traffic_of_all_ranks(told: dict[str, Any], bags: float, ids: float) -> None:
    found = facts_of(**told)
    assert (found.bags, found.ids, found.num_features) == (bags, ids, 2)


def test_constraints_that_can_just_be_met() -> None:
    assert facts_of().min_partition == 16 and not facts_of().weighted
    assert [facts_of(min_partition=n).min_partition for n in (4, 64)] == [4, 64]
    assert facts_of(is_weighted=True).weighted
    assert facts_of(device_group=[3, 0, 3]).ranks == (0, 3)
    for everyone in ("cpu", range(4), None):
        found = facts_of(device_group=everyone)
        assert found.ranks == (0, 1, 2, 3) and "data_parallel" in found.kernels
    assert set(found.kernels) == set(KINDS)


def test_tables_off_the_device_are_looked_at_where_memory_costs_much() -> None:
    """The bound that is told holds for them too."""
    listed = [table(f"t{n}", 400_000, 64) for n in range(4)]

    def solved(memory: int) -> tuple[set[str], PlanResult]:
        topology = Topology(2, "cuda", hbm_cap=memory, ddr_cap=8 << 30)
        result = plan_tables(listed, topology, batch_size=512, sharder=SHARDER)
        return {of.compute_kernel for module in result.plan.plan.values() for of in module.values()}, result

    (kernels, ample), (kernels_short, short) = solved(32 << 30), solved(1 << 27)
    assert kernels == {"fused"} and 0 < ample.bound_s <= ample.estimate.worst_s
    assert kernels_short != {"fused"} and ample.bound_s <= short.bound_s <= short.estimate.worst_s


@pytest.mark.parametrize(
    ("kind", "defaults"),
    [
        (Topology, {"compute_device": "cuda"}),
        (EmbeddingShardingPlanner, {}),
        (plan_tables, {"batch_size": 512, "dense_bytes": 0, "weighted": False, "path": ""}),
        (check_plan, {"dense_bytes": 0}),
        (ParameterConstraints, {}),
    ],
)
def test_defaults_of(kind: Any, defaults: dict[str, Any]) -> None:
    """Those that are not None."""
    given = inspect.signature(kind).parameters.values()
    told = {p.name: p.default for p in given if p.default not in (None, p.empty) and p.name != "additional_params"}
    assert told == defaults


def test_a_gpu_is_an_a100_if_nothing_is_said() -> None:
    assert Topology(2).device == Topology(2, gpu="a100_40").device and Topology(2).local_world_size == 2
    assert [(h.memory_bytes, h.host_bytes) for h in Topology(2).hosts] == [(40 << 30, 192 << 30)]


@pytest.mark.parametrize("data_type", [DataType.FP32, DataType.FP16, DataType.BF16])
@pytest.mark.parametrize("decay", [0.0, 1e-5])
@pytest.mark.parametrize("optimizer", list(RULES))
def test_tables_are_planned_with_kernels_that_can_train_them(optimizer: str, decay: float, data_type: DataType) -> None:
    """Host memory would hold more, but fbgemm alone trains there."""
    table = EmbeddingBagConfig(
        name="t", num_embeddings=300_000_000, embedding_dim=128, feature_names=["f"], data_type=data_type
    )
    sharder = EmbeddingBagCollectionSharder({"optimizer": optimizer, "weight_decay": decay})
    cluster = Topology.from_world("2", "h100", hbm_cap=20 << 30, ddr_cap=2000 << 30)
    gpu = torch.device("cuda", 0)
    refused = False
    try:
        check_trainable(table, EmbeddingComputeKernel.FUSED_UVM, sharder.optimizer, gpu)
    except ValueError as error:
        refused = True
        cause = "bf16" if data_type is DataType.BF16 else "weight decay"
        assert cause in str(error).lower()
    if refused:
        with pytest.raises(NoPlanError):
            plan_tables([table], cluster, sharder=sharder, batch_size=1024)
    else:
        plan = plan_tables([table], cluster, sharder=sharder, batch_size=1024).plan.plan[""]["t"]
        assert plan.compute_kernel.startswith("fused_uvm")


def test_a_plan_is_checked_without_a_search() -> None:
    """Tables of which the search places none, and a plan that fits: the constraint forbids what the plan does."""
    table = EmbeddingBagConfig(name="t", num_embeddings=1_000_000, embedding_dim=64, feature_names=["f"])
    module = EmbeddingBagCollection([table], device="meta")
    cluster = Topology(world_size=2, compute_device="cpu", ddr_cap=230 << 20)
    sharders = [EmbeddingBagCollectionSharder({"optimizer": "sgd"})]
    shards = CUTS[ShardingType.ROW_WISE]("t", 1_000_000, 64, [0, 1])
    plan = ShardingPlan({"": {"t": ParameterSharding("row_wise", "fused", shards=shards)}})
    only_whole = {"t": ParameterConstraints(sharding_types=["table_wise"])}
    planner = EmbeddingShardingPlanner(topology=cluster, constraints=only_whole)
    with pytest.raises(NoPlanError):
        planner.plan(module, sharders)
    assert planner.judge(plan, module, sharders).plan == plan


def test_a_model_without_a_plan_is_planned_for_this_machine() -> None:
    """Not for a preset, which has 16 GiB a rank."""
    (host,) = Topology.of_this_machine(1).hosts
    memory = host.host_bytes or host.memory_bytes

    def plan(share: float) -> ShardingPlan:
        rows = int(memory * share) // 256
        model = EmbeddingBagCollection(
            [EmbeddingBagConfig(name="t", num_embeddings=rows, embedding_dim=64, feature_names=["f"])], device="meta"
        )
        env, sharders = ShardingEnv.from_local(1, 0), [EmbeddingBagCollectionSharder({})]
        return default_plan(model, sharders, env, torch.device("cpu"))

    assert plan(0.75).plan[""]["t"].sharding_type == "table_wise"
    with pytest.raises(NoPlanError):
        plan(1.1)


def gib_of_a_rank(group: dist.ProcessGroup, local_world_size: int | None) -> float:
    """A rank's memory, as a model without a plan is told that is too large for it."""
    env = ShardingEnv.from_process_group(group, local_world_size)
    with pytest.raises(NoPlanError) as caught:
        DistributedModelParallel(collection([table("t", 1 << 40)]), env, torch.device("cpu"))
    (gib,) = re.findall(r"of its ([\d.]+) GiB are reserved", str(caught.value))
    return float(gib)


def test_a_model_without_a_plan_is_planned_for_the_hosts_of_its_ranks() -> None:
    """Two hosts have twice the memory of one."""
    (host,) = Topology.of_this_machine(1).hosts
    one_host, two_hosts = (on_ranks(2, gib_of_a_rank, size)[0] for size in (None, 1))
    assert two_hosts == pytest.approx(host.memory_bytes / 2**30, abs=0.1)
    assert one_host == pytest.approx(two_hosts / 2, abs=0.1)


def test_memory_is_shared_with_ranks_of_other_groups() -> None:
    shared, own = (Topology.of_this_machine(2, 1, ranks).hosts[0] for ranks in (4, None))
    assert 0 <= own.memory_bytes + own.host_bytes - 4 * (shared.memory_bytes + shared.host_bytes) < 8
