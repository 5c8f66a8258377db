"""The machine planned for: hosts, their ranks, memory and speed. A fact; nothing is probed unless asked for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from rayrec.container import memory_bytes
from rayrec.distributed.planner.hosts import (
    BasicCommsBandwidths,
    CustomTopologyData,
    Host,
    host_sizes,
    per_host,
    positive,
)
from rayrec.distributed.planner.parts import DeviceHardware, Perf, Storage
from rayrec.distributed.planner.presets import DEFAULT_GPU, Device, device, preset_of

CALIBRATION_VERSION = 4
MS_PER_S = 1000
_DEVICE_ARGS = {
    "ddr_mem_bw": "memory_bw",
    "hbm_mem_bw": "memory_bw",
    "hbm_to_ddr_mem_bw": "host_to_device_bw",
    "intra_host_bw": "intra_host_bw",
    "inter_host_bw": "inter_host_bw",
}


@dataclass(frozen=True, init=False)
class Topology:
    """`world_size` ranks on hosts of `local_world_size`, each with a device of one kind.

    Args:
        world_size: number of ranks.
        compute_device: "cuda" or "cpu".
        local_world_size: ranks of a host; default: all ranks on one host. A shorter last host is legal.
        gpu: a preset of `presets.DEVICES` to start from, as "h100"; default "a100_40" for cuda, "cpu" for cpu.
        hbm_cap: bytes of device memory a rank (cuda); a list gives one number a host.
        ddr_cap: bytes of host memory a rank; with "cpu" this is where tables lie. A list gives one number a host.
        hbm_mem_bw, ddr_mem_bw, hbm_to_ddr_mem_bw, intra_host_bw, inter_host_bw: bytes per millisecond, one direction.
        custom_topology_data: memory of each rank; a host has that of its smallest one.
        ssd_cap, pod_size, ssd_mem_bw, bwd_compute_multiplier, weighted_feature_bwd_compute_multiplier,
            uneven_sharding_perf_multiplier, generalized_comms_bandwidths, created_by_factory: taken and not needed:
            costs are the planner's own.
        hosts: ranks of each host, for unlike hosts; replaces `local_world_size`.

    Raises:
        ValueError: a size that is not positive, hosts that do not add up, an unknown device.
    """

    world_size: int
    compute_device: str
    device: Device
    hosts: tuple[Host, ...] = field(default=())

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
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1")
        if compute_device not in ("cpu", "cuda"):
            raise ValueError(f"compute_device={compute_device!r} must be 'cpu' or 'cuda'")
        base = device(gpu or ("cpu" if compute_device == "cpu" else DEFAULT_GPU))
        if base.kind != compute_device:
            raise ValueError(f"gpu={gpu!r} is a {base.kind} device, but compute_device={compute_device!r}")
        sizes = host_sizes(world_size, local_world_size, hosts)
        unused = "hbm_mem_bw" if compute_device == "cpu" else "ddr_mem_bw"
        given = {
            "hbm_mem_bw": hbm_mem_bw,
            "ddr_mem_bw": ddr_mem_bw,
            "hbm_to_ddr_mem_bw": hbm_to_ddr_mem_bw,
            "intra_host_bw": intra_host_bw,
            "inter_host_bw": inter_host_bw,
        }
        rates = {
            _DEVICE_ARGS[name]: positive(name, rate) * MS_PER_S
            for name, rate in given.items()
            if rate is not None and name != unused
        }
        if custom_topology_data is not None:
            hbm_cap = custom_topology_data.by_host("hbm_cap", sizes) or hbm_cap
            ddr_cap = custom_topology_data.by_host("ddr_cap", sizes) or ddr_cap
        own = replace(base, **rates)  # type: ignore[arg-type]
        if compute_device == "cpu":
            memory, beside = per_host("ddr_cap", ddr_cap, base.memory_bytes, len(sizes)), [0] * len(sizes)
        else:
            memory = per_host("hbm_cap", hbm_cap, base.memory_bytes, len(sizes))
            beside = per_host("ddr_cap", ddr_cap, base.host_bytes, len(sizes))
        self._set(world_size, compute_device, own, sizes, memory, beside)

    def _set(
        self, world_size: int, kind: str, own: Device, sizes: list[int], memory: list[int], beside: list[int]
    ) -> None:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        built = tuple(Host(*facts) for facts in zip(starts, sizes, memory, beside, strict=True))
        for name, value in (("world_size", world_size), ("compute_device", kind), ("device", own), ("hosts", built)):
            object.__setattr__(self, name, value)  # the dataclass is frozen; this is its only writer

    @property
    def local_world_size(self) -> int:
        """Ranks of the largest host."""
        return max(host.num_ranks for host in self.hosts)

    @property
    def intra_group_size(self) -> int:
        return self.local_world_size

    @property
    def devices(self) -> list[DeviceHardware]:
        """Each rank's memory, with nothing to do yet."""
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
        """Of the device's memory, in bytes per millisecond; as the others."""
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

    def host_of(self, rank: int) -> Host:
        """The host that `rank` is on."""
        return next(host for host in self.hosts if rank in host.ranks)

    def with_device(self, own: Device) -> Topology:
        """The same hosts with the speeds of another device."""
        copy = object.__new__(Topology)
        sizes = [h.num_ranks for h in self.hosts]
        memory, beside = [h.memory_bytes for h in self.hosts], [h.host_bytes for h in self.hosts]
        copy._set(self.world_size, self.compute_device, own, sizes, memory, beside)
        return copy

    def with_share(self, share: float) -> Topology:
        """The same machine with a share of its device memory (RAM where that is the CPU)."""
        return self._with_memory([int(host.memory_bytes * share) for host in self.hosts])

    def less(self, num_bytes: int) -> Topology:
        """The same machine with so many bytes less of device memory a rank (RAM where that is the CPU)."""
        return self._with_memory([host.memory_bytes - num_bytes for host in self.hosts])

    def _with_memory(self, memory: list[int]) -> Topology:
        copy = object.__new__(Topology)
        sizes, beside = [h.num_ranks for h in self.hosts], [h.host_bytes for h in self.hosts]
        copy._set(self.world_size, self.compute_device, self.device, sizes, memory, beside)
        return copy

    def with_hosts(self, count: int) -> Topology:
        """The same kind of machine with `count` hosts like the largest one."""
        best = max(self.hosts, key=lambda host: host.num_ranks)
        copy = object.__new__(Topology)
        sizes, memory, beside = [best.num_ranks] * count, [best.memory_bytes] * count, [best.host_bytes] * count
        copy._set(best.num_ranks * count, self.compute_device, self.device, sizes, memory, beside)
        return copy

    def with_local(self, ranks: int) -> Topology:
        """One host of `ranks` ranks, each like those of the largest host."""
        best = max(self.hosts, key=lambda host: host.num_ranks)
        copy = object.__new__(Topology)
        copy._set(ranks, self.compute_device, self.device, [ranks], [best.memory_bytes], [best.host_bytes])
        return copy

    @classmethod
    def from_world(
        cls, text: str, gpu: str = "h100", hbm_cap: int | None = None, ddr_cap: int | None = None
    ) -> Topology:
        """The topology of `HOSTSxRANKS`, as "16x8": 16 hosts of 8 ranks; "8" alone is one host.

        Raises:
            ValueError: another form.
        """
        parts = text.lower().split("x")
        if len(parts) not in (1, 2) or not all(part.isdigit() and int(part) for part in parts):
            raise ValueError(f"world {text!r} must be HOSTSxRANKS, as 16x8, or a number of ranks on one host, as 8")
        hosts, local = (1, int(parts[0])) if len(parts) == 1 else (int(parts[0]), int(parts[1]))
        kind = device(gpu).kind
        return cls(hosts * local, kind, local_world_size=local, gpu=gpu, hbm_cap=hbm_cap, ddr_cap=ddr_cap)

    @classmethod
    def of_this_machine(cls, world_size: int, local_world_size: int | None = None) -> Topology:
        """A topology with this machine's memory, or its container's: each GPU's, or RAM shared by a host's ranks."""
        local = local_world_size or world_size
        ram = memory_bytes()
        if not torch.cuda.is_available():
            return cls(world_size, "cpu", local_world_size=local, ddr_cap=ram // local)
        facts = torch.cuda.get_device_properties(0)
        known = preset_of(facts.name)
        return cls(
            world_size,
            "cuda",
            local_world_size=local,
            gpu=known,
            hbm_cap=facts.total_memory,
            ddr_cap=ram // local,
        )

    @classmethod
    def from_calibration(cls, path: str | Path, world_size: int, **more: object) -> Topology:
        """A topology with the speeds that `jobs/calibrate.py` measured and wrote to `path`.

        Args:
            path: the JSON file.
            world_size: ranks to plan for; further arguments as for `Topology`.

        Raises:
            ValueError: not such a file, or of another version.
        """
        from rayrec.distributed.planner.calibration import Calibration

        calibration = Calibration.read(path)
        return calibration.on(cls(world_size, calibration.kind, **more))  # type: ignore[arg-type]
