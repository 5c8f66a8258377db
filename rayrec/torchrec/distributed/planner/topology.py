"""`Topology` with TorchRec's signature and properties."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rayrec.distributed.planner.machine import topology
from rayrec.distributed.planner.machine.hosts import positive, ranks_per_host
from rayrec.torchrec.distributed.planner.parts import DeviceHardware, Perf, Storage

MS_PER_S = 1000


@dataclass(frozen=True, slots=True)
class BasicCommsBandwidths:
    """Bytes per millisecond between ranks of different hosts, and between ranks of a host."""

    inter_host_bw: float
    intra_host_bw: float


class CustomTopologyData:
    """Memory of each rank, if ranks differ.

    Args:
        data: bytes per rank, under `hbm_cap`, `ddr_cap` or `ssd_cap`.
        world_size: number of ranks.

    Raises:
        ValueError: another field, or another number of ranks.
    """

    supported_fields = ("ddr_cap", "hbm_cap", "ssd_cap")

    def __init__(self, data: Mapping[str, Sequence[int]], world_size: int) -> None:
        for name, values in data.items():
            if name not in self.supported_fields:
                raise ValueError(
                    f"custom topology data: unknown field {name!r}; choose one of {', '.join(self.supported_fields)}"
                )
            if len(values) != world_size:
                raise ValueError(f"custom topology data: {name} has {len(values)} values for {world_size} ranks")
        self._data = {name: list(values) for name, values in data.items()}

    def has_data(self, key: str) -> bool:
        return key in self._data

    def get_data(self, key: str) -> list[int]:
        """Return bytes per rank."""
        return self._data[key]

    def by_host(self, key: str, sizes: Sequence[int]) -> list[int] | None:
        """Return the bytes of the smallest rank of each host; None without data."""
        if key not in self._data:
            return None
        starts = [sum(sizes[:host]) for host in range(len(sizes))]
        return [min(self._data[key][start : start + size]) for start, size in zip(starts, sizes, strict=True)]


class Topology(topology.Topology):
    """rayrec's `Topology` with the other arguments of TorchRec.

    Args:
        hbm_mem_bw, ddr_mem_bw, hbm_to_ddr_mem_bw, intra_host_bw, inter_host_bw: bytes per millisecond in one direction;
            `ddr_mem_bw` applies to "cpu" ranks, `hbm_mem_bw` to others.
        custom_topology_data: memory of each rank; all ranks of a host get the value of its smallest rank.
        ssd_cap, pod_size, ssd_mem_bw, bwd_compute_multiplier, weighted_feature_bwd_compute_multiplier,
            uneven_sharding_perf_multiplier, generalized_comms_bandwidths, created_by_factory: ignored; the planner has
            its own cost model.
    """

    def __init__(
        self,
        world_size: int,
        compute_device: str = "cuda",
        hbm_cap: int | Sequence[int] | None = None,
        ddr_cap: int | Sequence[int] | None = None,
        ssd_cap: int | None = None,
        local_world_size: int | None = None,
        pod_size: int | None = None,
        hbm_mem_bw: float | None = None,
        ddr_mem_bw: float | None = None,
        ssd_mem_bw: float | None = None,
        hbm_to_ddr_mem_bw: float | None = None,
        intra_host_bw: float | None = None,
        inter_host_bw: float | None = None,
        bwd_compute_multiplier: float = 2,
        custom_topology_data: CustomTopologyData | None = None,
        weighted_feature_bwd_compute_multiplier: float = 1,
        uneven_sharding_perf_multiplier: float = 1.0,
        generalized_comms_bandwidths: object = None,
        created_by_factory: bool = False,
        *,
        gpu: str | None = None,
        hosts: Sequence[int] | None = None,
    ) -> None:
        if custom_topology_data is not None:
            sizes = ranks_per_host(world_size, local_world_size, hosts)
            hbm_cap = custom_topology_data.by_host("hbm_cap", sizes) or hbm_cap
            ddr_cap = custom_topology_data.by_host("ddr_cap", sizes) or ddr_cap
        super().__init__(
            world_size, compute_device, hbm_cap, ddr_cap, local_world_size=local_world_size, hosts=hosts, gpu=gpu
        )
        memory = ("ddr_mem_bw", ddr_mem_bw) if compute_device == "cpu" else ("hbm_mem_bw", hbm_mem_bw)
        bandwidths = {  # by field of `Device`
            "memory_bw": memory,
            "host_to_device_bw": ("hbm_to_ddr_mem_bw", hbm_to_ddr_mem_bw),
            "intra_host_bw": ("intra_host_bw", intra_host_bw),
            "inter_host_bw": ("inter_host_bw", inter_host_bw),
        }
        rates: dict[str, Any] = {
            field: positive(name, rate) * MS_PER_S for field, (name, rate) in bandwidths.items() if rate is not None
        }
        object.__setattr__(self, "device", replace(self.device, **rates))

    @property
    def intra_group_size(self) -> int:
        return self.local_world_size

    @property
    def devices(self) -> list[DeviceHardware]:
        """The memory of each rank, without load."""
        on_cpu = self.compute_device == "cpu"
        return [
            DeviceHardware(
                rank,
                Storage(0, host.memory_bytes) if on_cpu else Storage(host.memory_bytes, host.host_bytes),
                Perf(0, 0, 0, 0),
            )
            for host in self.hosts
            for rank in host.ranks
        ]

    @property
    def comms_bandwidths(self) -> BasicCommsBandwidths:
        return BasicCommsBandwidths(self.inter_host_bw, self.intra_host_bw)

    @property
    def hbm_mem_bw(self) -> float:
        """Bytes per millisecond, like the other bandwidths."""
        return self.device.memory_bw / MS_PER_S

    @property
    def hbm_to_ddr_mem_bw(self) -> float:
        return self.device.host_to_device_bw / MS_PER_S

    @property
    def intra_host_bw(self) -> float:
        return self.device.intra_host_bw / MS_PER_S

    @property
    def inter_host_bw(self) -> float:
        return self.device.inter_host_bw / MS_PER_S
