"""The host of each rank with its resources, and the planner's topology of all hosts."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from rayrec._runtime.cgroup_limits import cpus, memory_bytes
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.planner import Topology
from rayrec.distributed.planner.machine.calibration import Calibration
from rayrec.distributed.planner.machine.devices import preset_of
from rayrec.distributed.planner.report.host_traffic import exchange_text
from rayrec.distributed.planner.sharding_groups import group_topology
from rayrec.distributed.replicas import GroupLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The host of a rank, as the rank sees it.

    Args:
        node: id of the host: Ray's node id, or the hostname.
        name: address or name of the host, for display.
        memory_bytes: RAM of the host, within the container's limit, for all its ranks together.
        cpus: CPUs of the host, within the container's limit, for all its ranks together.
        gpu: name of the rank's GPU; None: the rank uses the CPU.
        gpu_bytes: memory of that GPU.
    """

    node: str
    name: str
    memory_bytes: int
    cpus: float
    gpu: str | None = None
    gpu_bytes: int = 0

    @classmethod
    def here(cls, device: torch.device, node: str | None = None, name: str | None = None) -> Machine:
        """The machine of this process."""
        host = socket.gethostname()
        properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        return cls(
            node=node or host,
            name=name or host,
            memory_bytes=memory_bytes(),
            cpus=cpus(),
            gpu=None if properties is None else properties.name,
            gpu_bytes=0 if properties is None else properties.total_memory,
        )


def ranks_by_host(machines: Sequence[Machine]) -> list[list[int]]:
    """Ranks of each host, in order. A host with non-consecutive ranks counts as several hosts."""
    runs = groupby(range(len(machines)), key=lambda rank: machines[rank].node)
    return [list(ranks) for _, ranks in runs]


def topology_of(machines: Sequence[Machine], calibration: Calibration | None = None) -> Topology:
    """The topology of the hosts: number of ranks, memory per rank, and speeds.

    Args:
        machines: machine of each rank.
        calibration: measured speeds, instead of presets.

    Raises:
        ValueError: the calibration is for another kind of device.
    """
    hosts = ranks_by_host(machines)
    on_node = Counter(machine.node for machine in machines)
    ram = [min(machines[rank].memory_bytes for rank in ranks) // on_node[machines[ranks[0]].node] for ranks in hosts]
    sizes = [len(ranks) for ranks in hosts]
    gpu = machines[0].gpu
    if gpu is None:
        topology = Topology(len(machines), "cpu", hosts=sizes, ddr_cap=ram)
    else:
        vram = [min(machines[rank].gpu_bytes for rank in ranks) for ranks in hosts]
        topology = Topology(len(machines), "cuda", hosts=sizes, gpu=preset_of(gpu), hbm_cap=vram, ddr_cap=ram)
    return topology if calibration is None else topology.with_calibration(calibration)


def planned_for(
    plan: ShardingPlan,
    machines: Sequence[Machine],
    calibration: Calibration | None = None,
    layout: GroupLayout | None = None,
) -> dict[str, Any]:
    """The hosts and speeds that the planner assumed, and how hosts exchange embedding vectors; for `plan.json`.

    Args:
        layout: the sharding groups, which all use `plan`. Default: one group.
    """
    topology = topology_of(machines, calibration)
    hosts = [
        {
            "name": machines[host.first_rank].name,
            "ranks": host.num_ranks,
            "cpus": machines[host.first_rank].cpus,
            "memory_bytes": machines[host.first_rank].memory_bytes,
            "gpu": machines[host.first_rank].gpu,
        }
        for host in topology.hosts
    ]
    speeds = "presets" if calibration is None else calibration.path
    per_group = topology if layout is None else group_topology(topology, layout)
    return {"hosts": hosts, "speeds": speeds, "exchange": exchange_text(plan, per_group)}
