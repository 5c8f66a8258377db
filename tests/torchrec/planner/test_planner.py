"""TorchRec's planner: constants, defaults, settings, reserved memory, proposals, errors."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rayrec.distributed import ShardingPlan
from rayrec.torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology, constants
from rayrec.torchrec.distributed.planner.bases import PerfModel, Stats
from rayrec.torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from rayrec.torchrec.distributed.planner.factory import HardwareConfig, KernelConfig, TopologyFactory, TrainerConfig
from rayrec.torchrec.distributed.planner.parts import (
    Perf,
    PlannerError,
    PlannerErrorType,
    Proposal,
    Shard,
    ShardingOption,
    Storage,
)
from rayrec.torchrec.distributed.planner.planners import EmbeddingPlannerBase
from rayrec.torchrec.distributed.planner.proposers import GridSearchProposer, Proposer, UniformProposer
from rayrec.torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from rayrec.torchrec.distributed.planner.storage_reservations import (
    FixedAbsoluteStorageReservation,
    FixedPercentageStorageReservation,
    HeuristicalStorageReservation,
)
from rayrec.torchrec.distributed.types import PipelineType
from tests.planner.problems import SHARDER, collection, table
from tests.ranks import Ranks


def test_constants_are_torchrecs() -> None:
    assert {name: value for name, value in vars(constants).items() if name.isupper()} == {
        "GIB": 2**30,
        "BATCH_SIZE": 512,
        "HBM_CAP": 32 * 2**30,
        "DDR_CAP": 128 * 2**30,
        "SSD_CAP": 2 * 2**40,
        "HBM_MEM_BW": pytest.approx(897 * 2**30 / 1000),
        "DDR_MEM_BW": pytest.approx(51 * 2**30 / 1000),
        "SSD_MEM_BW": pytest.approx(0.1 * 2**20),
        "HBM_TO_DDR_MEM_BW": pytest.approx(32 * 2**30 / 1000),
        "INTRA_NODE_BANDWIDTH": pytest.approx(600 * 2**30 / 1000),
        "CROSS_NODE_BANDWIDTH": pytest.approx(12.5 * 2**30 / 1000),
        "MIN_CW_DIM": 128,
        "POOLING_FACTOR": 1.0,
        "NUM_POOLINGS": 1.0,
        "BIGINT_DTYPE": 8,
        "UVM_CACHING_RATIO": 0.2,
        "KV_CACHING_RATIO": 0.2,
        "BWD_COMPUTE_MULTIPLIER": 2,
        "WEIGHTED_FEATURE_BWD_COMPUTE_MULTIPLIER": 1,
        "MAX_SIZE": 2**63 - 1,
        "DEFAULT_LOAD_FACTOR": 0.2,
    }


ONE_CPU = Topology(1, "cpu")
OPTION = ("t", torch.empty(1), ("ebc", nn.Module()), [1.0], 8, "table_wise", "device", "fused", [Shard([1], [0])])


@pytest.mark.parametrize(
    ("kind", "make", "defaults"),
    [
        (
            Topology,
            lambda: Topology(2),
            {
                "compute_device": "cuda",
                "bwd_compute_multiplier": 2,
                "weighted_feature_bwd_compute_multiplier": 1,
                "uneven_sharding_perf_multiplier": 1.0,
                "created_by_factory": False,
            },
        ),
        (EmbeddingShardingPlanner, EmbeddingShardingPlanner, {"debug": True}),
        (EmbeddingPlannerBase, EmbeddingShardingPlanner, {"debug": True}),
        (
            EmbeddingEnumerator,
            lambda: EmbeddingEnumerator(ONE_CPU),
            {"batch_size": 512, "use_exact_enumerate_order": False},
        ),
        (TrainerConfig, lambda: TopologyFactory.create_topology(TrainerConfig(1)), {"is_dry_run": False}),
        (HardwareConfig, lambda: TopologyFactory.create_topology(TrainerConfig(1), HardwareConfig()), {}),
        (
            KernelConfig,
            lambda: TopologyFactory.create_topology(TrainerConfig(1), None, KernelConfig()),
            {
                "compute_device": "cuda",
                "bwd_compute_multiplier": 2,
                "weighted_feature_bwd_compute_multiplier": 1,
                "uneven_sharding_perf_multiplier": 1.0,
                "use_hardware_based_bandwidth": False,
            },
        ),
        (EmbeddingPerfEstimator, lambda: EmbeddingPerfEstimator(ONE_CPU), {"is_inference": False}),
        (
            EmbeddingStorageEstimator,
            lambda: EmbeddingStorageEstimator(ONE_CPU),
            {"pipeline_type": PipelineType.NONE, "run_embedding_at_peak_memory": False, "is_inference": False},
        ),
        (ParameterConstraints, ParameterConstraints, {"use_virtual_table": False}),
        (Perf, lambda: Perf(1, 1, 1, 1).total, {"input_dist_comms": 0.0, "prefetch_compute": 0.0}),
        (Storage, lambda: Storage(1, 1) + Storage(1, 1), {"ssd": 0}),
        (Shard, lambda: hash(Shard([1], [0])), {}),
        (ShardingOption, lambda: ShardingOption(*OPTION), {}),
        (
            HeuristicalStorageReservation,
            lambda: HeuristicalStorageReservation(0.5),
            {"parameter_multiplier": 6.0},
        ),
    ],
)
def test_defaults_of(kind: Any, make: Callable[[], Any], defaults: dict[str, Any]) -> None:
    """Those that are not None."""
    make()
    given = inspect.signature(kind).parameters.values()
    found = {p.name: p.default for p in given if p.default not in (None, p.empty) and p.name != "additional_params"}
    assert found == defaults


def memory_of(**trainer: Any) -> list[int]:
    """Bytes on the device and beside it, of hardware with 10 and 20."""
    made = TopologyFactory.create_topology(TrainerConfig(2, **trainer), HardwareConfig(10, 20))
    storage = made.devices[1].storage
    return [storage.hbm, storage.ddr]


def test_a_trainers_memory_goes_before_the_hardwares_and_a_dry_runs_before_both() -> None:
    dry = {"dry_run_hbm_bytes": 3, "dry_run_ddr_bytes": 4}
    assert memory_of() == memory_of(**dry) == memory_of(is_dry_run=True) == [10, 20]
    assert memory_of(hbm_cap_bytes=5) == [5, 20] and memory_of(ddr_cap_bytes=6) == [10, 6]
    both = {"hbm_cap_bytes": 5, "ddr_cap_bytes": 6}
    assert memory_of(**both, **dry) == memory_of(**both, is_dry_run=True) == [5, 6]
    assert memory_of(**both, **dry, is_dry_run=True) == memory_of(**dry, is_dry_run=True) == [3, 4]
    speeds = HardwareConfig(intra_host_bw=7.0, inter_host_bw=9.0, hbm_mem_bw=11.0)
    for counted in (False, True):
        made = TopologyFactory.create_topology(
            TrainerConfig(2), speeds, KernelConfig(use_hardware_based_bandwidth=counted)
        )
        own = Topology(2)
        assert made.hbm_mem_bw == 11.0
        assert (made.intra_host_bw, made.inter_host_bw) == (
            (7.0, 9.0) if counted else (own.intra_host_bw, own.inter_host_bw)
        )


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_a_share_of_memory_stays_free(share: float) -> None:
    topology = Topology(2, "cpu", ddr_cap=1000)
    reservation = FixedPercentageStorageReservation(share)
    assert reservation.last_reserved_topology is None
    reserved = reservation.reserve(topology)
    assert [host.memory_bytes for host in reserved.hosts] == [1000 * (1 - share)]
    assert reservation.last_reserved_topology is reserved


def test_what_cannot_stay_free_is_refused() -> None:
    for share in (-0.01, 1.01):
        with pytest.raises(ValueError, match="must be from 0 to 1"):
            FixedPercentageStorageReservation(share)
    with pytest.raises(ValueError, match="must not be negative"):
        FixedAbsoluteStorageReservation(-1)
    topology = Topology(2, "cpu", ddr_cap=1000)
    assert FixedAbsoluteStorageReservation(0).reserve(topology).hosts[0].memory_bytes == 1000
    assert FixedAbsoluteStorageReservation(999).reserve(topology).hosts[0].memory_bytes == 1
    with pytest.raises(PlannerError, match="hbm_reserved_bytes=1000 must be less than the 1000 bytes of a rank"):
        FixedAbsoluteStorageReservation(1000).reserve(topology)
    assert FixedAbsoluteStorageReservation.from_gb(0.5)._bytes == 1 << 29


@pytest.mark.parametrize(
    ("name", "instead"),
    [
        ("output_dtype", "=True is not supported: vectors are float32; cast the output of the collection"),
        ("key_value_params", "=True is not supported: tables on disk are not supported; use fused_uvm_caching"),
        ("use_virtual_table", " is not supported; use a dynamic table"),
    ],
)
def test_constraints_that_are_not_offered_are_refused_by_name(name: str, instead: str):
    with pytest.raises(ValueError, match=f"ParameterConstraints: {name}{instead}"):
        ParameterConstraints(**{name: True})


class Told(Stats):
    """What the planner said."""

    def log(self, sharding_plan: ShardingPlan, topology: Topology, batch_size: int, **more: Any) -> None:
        self.told = more


class AllAlike(PerfModel):
    def rate(self, plan: Proposal) -> float:
        return 1.0


def test_proposals_are_counted_and_of_equal_plans_the_first_one_stays():
    told = {
        "t": ParameterConstraints(sharding_types=["table_wise", "row_wise", "data_parallel"]),
        "u": ParameterConstraints(sharding_types=["table_wise"]),
    }

    def planned_by(proposer: Proposer, **memory: int) -> tuple[str, Told]:
        planner = EmbeddingShardingPlanner(
            topology=Topology(2, "cpu", **memory),
            constraints=told,
            proposer=proposer,
            performance_model=AllAlike(),
            stats=(stats := Told()),
        )
        plan = planner.plan(collection([table("t", 1 << 20), table("u")]), [SHARDER])
        return plan.plan[""]["t"].sharding_type, stats

    first, stats = planned_by(UniformProposer())
    assert first == "table_wise"  # the only kind that both may have
    assert (stats.told["num_proposals"], stats.told["num_plans"]) == (1, 1)
    first, stats = planned_by(GridSearchProposer())
    assert (stats.told["num_proposals"], stats.told["num_plans"]) == (3, 3)
    proposed = []

    class Noted(GridSearchProposer):
        def feedback(self, partitionable: bool, *more: Any, **named: Any) -> None:
            proposed.append((partitionable, [option.sharding_type for option in self.propose() or []]))
            super().feedback(partitionable, *more, **named)

    again, _ = planned_by(Noted())
    assert again == first == proposed[0][1][0]
    with pytest.raises(PlannerError, match="none of 3 proposals for 2 ranks fits"):
        planned_by(GridSearchProposer(), ddr_cap=1 << 20)


def test_no_plan_is_a_planner_error():
    planner = EmbeddingShardingPlanner(Topology(2, "cpu", ddr_cap=1 << 20))
    with pytest.raises(PlannerError, match=r"table 't'.* needs at least") as caught:
        planner.plan(collection([table("t", 1 << 20)]), [SHARDER])
    assert caught.value.error_type is PlannerErrorType.INSUFFICIENT_STORAGE


def test_reserved_memory_stays_free():
    """Two tables of 256 MiB fit on one rank; with 1 GiB reserved of 1.5 GiB only one does."""
    told = {name: ParameterConstraints(sharding_types=["table_wise"], device_group=[0]) for name in "tu"}
    model = collection([table(name, 1 << 20) for name in told])
    topology = Topology(2, "cpu", ddr_cap=3 << 29)
    assert EmbeddingShardingPlanner(topology, constraints=told).plan(model, [SHARDER]).plan[""]["u"].ranks == [0]
    with pytest.raises(PlannerError, match="no plan"):
        reserved = FixedAbsoluteStorageReservation(1 << 30)
        EmbeddingShardingPlanner(topology, constraints=told, storage_reservation=reserved).plan(model, [SHARDER])


def _collective(group, ddr_cap):
    told = {"t": ParameterConstraints(sharding_types=["row_wise"])}
    planner = EmbeddingShardingPlanner(Topology(2, "cpu", ddr_cap=ddr_cap), constraints=told)
    try:
        return planner.collective_plan(collection([table("t", 1 << 20)]), None, group).to_json()
    except PlannerError as error:
        return error.error_type


def test_collective_plan_is_one_plan_or_one_error_on_all_ranks():
    ranks = Ranks(2)
    try:
        good, bad = ranks.run(_collective, 1 << 32), ranks.run(_collective, 1 << 20)
    finally:
        ranks.close()
    assert good[0] == good[1] and '"row_wise"' in good[0]
    assert bad == [PlannerErrorType.INSUFFICIENT_STORAGE] * 2
