"""The cluster to plan for: hosts, ranks, memory and speeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import torch

from rayrec._runtime.cgroup_limits import memory_bytes
from rayrec.distributed.planner.machine.calibration import Calibration
from rayrec.distributed.planner.machine.devices import DEFAULT_GPU, Device, device, preset_of
from rayrec.distributed.planner.machine.hosts import Host, per_host, ranks_per_host


@dataclass(frozen=True, init=False)
class Topology:
    """`world_size` ranks on hosts of `local_world_size` ranks, all with the same kind of device.

    Args:
        world_size: number of ranks.
        compute_device: "cuda" or "cpu".
        hbm_cap: bytes of device memory per rank (cuda); a list gives one number per host.
        ddr_cap: bytes of host memory per rank; with "cpu" it holds the tables. A list gives one number per host.
        local_world_size: ranks per host; default: all ranks on one host. The last host may have fewer.
        hosts: ranks of each host, if they differ; replaces `local_world_size`.
        gpu: preset of `devices.DEVICES`, for example "h100"; default "a100_40" for cuda, "cpu" for cpu.

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
        *,
        local_world_size: int | None = None,
        hosts: Sequence[int] | None = None,
        gpu: str | None = None,
    ) -> None:
        if world_size < 1:
            raise ValueError(f"world_size={world_size} must be at least 1")
        if compute_device not in ("cpu", "cuda"):
            raise ValueError(f"compute_device={compute_device!r} must be 'cpu' or 'cuda'")
        base = device(gpu or ("cpu" if compute_device == "cpu" else DEFAULT_GPU))
        if base.kind != compute_device:
            raise ValueError(f"gpu={gpu!r} is a {base.kind} device, but compute_device={compute_device!r}")
        sizes = ranks_per_host(world_size, local_world_size, hosts)
        if compute_device == "cpu":
            memory, host_memory = per_host("ddr_cap", ddr_cap, base.memory_bytes, len(sizes)), [0] * len(sizes)
        else:
            memory = per_host("hbm_cap", hbm_cap, base.memory_bytes, len(sizes))
            host_memory = per_host("ddr_cap", ddr_cap, base.host_bytes, len(sizes))
        self._set(compute_device, base, sizes, memory, host_memory)

    def _set(self, kind: str, own: Device, sizes: list[int], memory: list[int], host_memory: list[int]) -> None:
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        built = tuple(Host(*facts) for facts in zip(starts, sizes, memory, host_memory, strict=True))
        values = {"world_size": sum(sizes), "compute_device": kind, "device": own, "hosts": built}
        for name, value in values.items():
            object.__setattr__(self, name, value)  # the only writer of this frozen dataclass

    def _copy(self, *, own: Device | None = None, hosts: Sequence[tuple[int, int, int]] | None = None) -> Self:
        """A copy with another device or other hosts (ranks, device bytes, host bytes)."""
        copy = object.__new__(type(self))
        host_facts = hosts or [(host.num_ranks, host.memory_bytes, host.host_bytes) for host in self.hosts]
        sizes, memory, host_memory = (list(column) for column in zip(*host_facts, strict=True))
        copy._set(self.compute_device, own or self.device, sizes, memory, host_memory)
        return copy

    @property
    def local_world_size(self) -> int:
        """Ranks of the largest host."""
        return self._largest.num_ranks

    @property
    def _largest(self) -> Host:
        return max(self.hosts, key=lambda host: host.num_ranks)

    def host_of(self, rank: int) -> Host:
        """The host of `rank`."""
        return next(host for host in self.hosts if rank in host.ranks)

    def with_device(self, own: Device) -> Self:
        """The same hosts with the speeds of another device."""
        return self._copy(own=own)

    def with_calibration(self, calibration: Calibration) -> Self:
        """The same hosts with measured speeds.

        Raises:
            ValueError: measured on another kind of device.
        """
        if calibration.kind != self.compute_device:
            raise ValueError(
                f"{calibration.path}: measured on {calibration.kind}, but the ranks have {self.compute_device}; "
                f"run jobs/calibrate.py where they run"
            )
        return self.with_device(replace(self.device, **dict[str, Any](calibration.speeds)))

    def less(self, num_bytes: int) -> Self:
        """The same cluster with `num_bytes` less device memory per rank (RAM for "cpu")."""
        return self._copy(hosts=[(h.num_ranks, h.memory_bytes - num_bytes, h.host_bytes) for h in self.hosts])

    def with_hosts(self, count: int) -> Self:
        """A cluster of `count` hosts like the largest one."""
        best = self._largest
        return self._copy(hosts=[(best.num_ranks, best.memory_bytes, best.host_bytes)] * count)

    def with_local(self, ranks: int) -> Self:
        """One host of `ranks` ranks with the memory of the largest host's ranks."""
        return self._copy(hosts=[(ranks, self._largest.memory_bytes, self._largest.host_bytes)])

    @classmethod
    def from_world(cls, text: str, gpu: str = "h100", hbm_cap: int | None = None, ddr_cap: int | None = None) -> Self:
        """The topology of `HOSTSxRANKS`: "16x8" is 16 hosts of 8 ranks, "8" is one host of 8.

        Raises:
            ValueError: another form.
        """
        sizes = text.lower().split("x")
        if len(sizes) not in (1, 2) or not all(part.isdigit() and int(part) for part in sizes):
            raise ValueError(f"world {text!r} must be HOSTSxRANKS, as 16x8, or a number of ranks on one host, as 8")
        hosts, local = (1, int(sizes[0])) if len(sizes) == 1 else (int(sizes[0]), int(sizes[1]))
        kind = device(gpu).kind
        return cls(hosts * local, kind, local_world_size=local, gpu=gpu, hbm_cap=hbm_cap, ddr_cap=ddr_cap)

    @classmethod
    def of_this_machine(
        cls, world_size: int, local_world_size: int | None = None, ranks_in_memory: int | None = None
    ) -> Self:
        """A topology with this machine's or container's memory: each GPU's, or RAM shared by a host's ranks.

        Args:
            world_size: number of ranks.
            local_world_size: ranks of each host; by default all ranks are on one host.
            ranks_in_memory: ranks that share a host's RAM, if there are others than those of this topology.
        """
        local = local_world_size or world_size
        ram = memory_bytes() // (ranks_in_memory or local)
        if not torch.cuda.is_available():
            return cls(world_size, "cpu", local_world_size=local, ddr_cap=ram)
        facts = torch.cuda.get_device_properties(0)
        preset = preset_of(facts.name)
        return cls(
            world_size,
            "cuda",
            local_world_size=local,
            gpu=preset,
            hbm_cap=facts.total_memory,
            ddr_cap=ram,
        )

    @classmethod
    def from_calibration(cls, path: str | Path, world_size: int, **more: Any) -> Self:
        """A topology with the speeds that `jobs/calibrate.py` measured.

        Args:
            path: the calibration file.
            world_size: number of ranks; `more` are further arguments of `Topology`.

        Raises:
            ValueError: not a calibration file, or another version.
        """
        calibration = Calibration.read(path)
        return cls(world_size, calibration.kind, **more).with_calibration(calibration)
