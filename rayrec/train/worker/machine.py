"""Which host a rank is on and what it has there, and from all ranks' words the topology that is planned for."""

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
    """What one rank sees.

    Args:
        node: identifies the host: Ray's id of the node, or the hostname.
        name: what people call it: its address, or the host's name.
        memory_bytes: RAM of the host, as the container sees it, for all its ranks together.
        cpus: CPUs of the host, likewise.
        gpu: name of the rank's GPU; None where it computes on CPUs.
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
        """This process's."""
        host = socket.gethostname()
        facts = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
        return cls(
            node=node or host,
            name=name or host,
            memory_bytes=memory_bytes(),
            cpus=cpus(),
            gpu=None if facts is None else facts.name,
            gpu_bytes=0 if facts is None else facts.total_memory,
        )


def ranks_by_host(machines: Sequence[Machine]) -> list[list[int]]:
    """Ranks of each host, in order; a host whose ranks do not follow each other counts as several."""
    runs = groupby(range(len(machines)), key=lambda rank: machines[rank].node)
    return [list(ranks) for _, ranks in runs]


def topology_of(machines: Sequence[Machine], calibration: Calibration | None = None) -> Topology:
    """The hosts that the ranks are on: how many ranks each has, their share of its memory, and how fast they are.

    Args:
        machines: every rank's.
        calibration: measured speeds, instead of those of the preset.

    Raises:
        ValueError: the calibration is of another kind of device.
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
    """What a plan was made for, as `plan.json` keeps it: hosts, whence speeds are, how and why vectors cross hosts.

    Args:
        layout: the sharding groups, of which each has the plan; by default one.
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
    own = topology if layout is None else group_topology(topology, layout)
    return {"hosts": hosts, "speeds": speeds, "exchange": exchange_text(plan, own)}
