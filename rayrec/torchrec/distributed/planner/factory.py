"""Creates a topology from three configs: trainer, hardware and kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rayrec.torchrec.distributed.planner.topology import Topology


@dataclass(frozen=True)
class TrainerConfig:
    """The ranks of a job and the memory it may use."""

    world_size: int | None = None
    local_world_size: int | None = None
    hbm_cap_bytes: int | None = None
    ddr_cap_bytes: int | None = None
    ssd_cap_bytes: int | None = None
    is_dry_run: bool = False
    dry_run_hbm_bytes: int | None = None
    dry_run_ddr_bytes: int | None = None
    pod_size: int | None = None
    additional_params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class HardwareConfig:
    """Memory per rank in bytes, and bandwidths in bytes per millisecond."""

    hbm_cap_bytes: int | None = None
    ddr_cap_bytes: int | None = None
    ssd_cap_bytes: int | None = None
    intra_host_bw: float | None = None
    inter_host_bw: float | None = None
    hbm_mem_bw: float | None = None
    ddr_mem_bw: float | None = None
    hbm_to_ddr_mem_bw: float | None = None
    ssd_mem_bw: float | None = None
    additional_params: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class KernelConfig:
    """The device type, and whether to use the bandwidths between ranks. The multipliers are ignored."""

    compute_device: str = "cuda"
    bwd_compute_multiplier: float = 2
    weighted_feature_bwd_compute_multiplier: float = 1
    uneven_sharding_perf_multiplier: float = 1.0
    use_hardware_based_bandwidth: bool = False
    generalized_comms_bandwidths: object | None = None
    additional_params: Mapping[str, Any] = field(default_factory=dict)


class TopologyFactory:
    """Creates a `Topology`."""

    @staticmethod
    def create_topology(
        trainer_config: TrainerConfig,
        hardware_config: HardwareConfig | None = None,
        kernel_config: KernelConfig | None = None,
    ) -> Topology:
        """Return the topology; the trainer's memory overrides the hardware's.

        Raises:
            ValueError: no world size.
        """
        trainer, hardware = trainer_config, hardware_config or HardwareConfig()
        if trainer.world_size is None:
            raise ValueError("TrainerConfig: world_size is missing")
        dry, kernel = trainer.is_dry_run, kernel_config or KernelConfig()
        between = kernel.use_hardware_based_bandwidth
        return Topology(
            trainer.world_size,
            kernel.compute_device,
            (trainer.dry_run_hbm_bytes if dry else None) or trainer.hbm_cap_bytes or hardware.hbm_cap_bytes,
            (trainer.dry_run_ddr_bytes if dry else None) or trainer.ddr_cap_bytes or hardware.ddr_cap_bytes,
            local_world_size=trainer.local_world_size,
            hbm_mem_bw=hardware.hbm_mem_bw,
            ddr_mem_bw=hardware.ddr_mem_bw,
            hbm_to_ddr_mem_bw=hardware.hbm_to_ddr_mem_bw,
            intra_host_bw=hardware.intra_host_bw if between else None,
            inter_host_bw=hardware.inter_host_bw if between else None,
        )
