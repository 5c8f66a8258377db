"""TorchRec's defaults: every public default of the planner's classes, and that it works."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rayrec.torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from rayrec.torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from rayrec.torchrec.distributed.planner.factory import HardwareConfig, KernelConfig, TopologyFactory, TrainerConfig
from rayrec.torchrec.distributed.planner.parts import Perf, Shard, ShardingOption, Storage
from rayrec.torchrec.distributed.planner.planners import EmbeddingPlannerBase
from rayrec.torchrec.distributed.planner.shard_estimators import EmbeddingPerfEstimator, EmbeddingStorageEstimator
from rayrec.torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from rayrec.torchrec.distributed.types import PipelineType

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
