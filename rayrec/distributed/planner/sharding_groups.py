"""2D plans: the topology of one sharding group, the cost of synchronizing replicas, the number of groups.

Each group is planned as a separate cluster; the cost of the exchange with replicas is added.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rayrec.distributed.comm.wire import ID_BYTES, VECTOR_ELEMENT_BYTES
from rayrec.distributed.plan.shards import ShardingType
from rayrec.distributed.planner.cost.seconds import distinct
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.report.result import NoPlanError, PlanResult
from rayrec.distributed.planner.report.shard_costs import shard_costs
from rayrec.distributed.replicas.layout import GroupLayout


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """The plan of one sharding group, and the cost of synchronization with the other groups.

    Args:
        layout: the groups.
        result: the plan of every group.
        sync_bytes: bytes that the busiest rank sends to its replicas per step, on average.
        sync_s: predicted seconds of synchronization per step, on average.
    """

    layout: GroupLayout
    result: PlanResult
    sync_bytes: float
    sync_s: float

    @property
    def step_s(self) -> float:
        """Predicted seconds of the embedding part of a step on the slowest rank, with synchronization."""
        return self.result.estimate.worst_s + self.sync_s


def group_topology(topology: Topology, layout: GroupLayout) -> Topology:
    """The topology of the group on most hosts, each host with the minimum memory of all hosts.

    Raises:
        ValueError: a layout for another number of ranks.
    """
    if layout.world_size != topology.world_size:
        raise ValueError(f"the layout has {layout.world_size} ranks, but the topology {topology.world_size}")
    if layout.replicas == 1:
        return topology
    host_of = {rank: host_number for host_number, host in enumerate(topology.hosts) for rank in host.ranks}
    sizes: list[int] = []
    for group_number in range(layout.replicas):
        ranks = layout.group_of(group_number if layout.strided else group_number * layout.group_size)
        on_hosts: dict[int, int] = {}
        for rank in ranks:
            on_hosts[host_of[rank]] = on_hosts.get(host_of[rank], 0) + 1
        if len(on_hosts) > len(sizes):
            sizes = list(on_hosts.values())
    memory = min(host.memory_bytes for host in topology.hosts)
    host_memory = min(host.host_bytes for host in topology.hosts)
    cpu = topology.compute_device == "cpu"
    caps = {"ddr_cap": memory} if cpu else {"hbm_cap": memory, "ddr_cap": host_memory or None}
    group = Topology(layout.group_size, topology.compute_device, hosts=sizes, **caps)
    return group.with_device(topology.device)


def grouped(result: PlanResult, layout: GroupLayout, topology: Topology, sync_every: int) -> Grouped:
    """The plan of a group with its synchronization cost.

    For n touched rows of c columns on a rank (`distinct` of the group's ids), R groups, s bytes of optimizer state:

    - every step: (R - 1) n (8 + 4 c) bytes; each replica then sorts and adds all R n rows
    - every N steps: row numbers of the rows touched since, (R - 1) n 8 bytes, and an all-reduce of weights and state
      of the u rows touched by any group, 2 (R - 1) / R bytes for each of u (4 c + s)

    Data-parallel tables synchronize in every step.
    """
    replicas, device = layout.replicas, topology.device
    tables = {table.key: table for table in result.tables}
    sent, seconds = [0.0] * layout.group_size, [0.0] * layout.group_size
    bandwidth = device.inter_host_bw if _crosses_hosts(layout, topology) else device.intra_host_bw
    for cost in shard_costs(result) if replicas > 1 else ():
        table, (rows, cols) = tables[cost.key], cost.shard.shape
        ids = table.ids * rows / table.rows
        steps = 1 if cost.sharding_type == ShardingType.DATA_PARALLEL.value else sync_every
        touched = distinct(steps * ids, rows)
        if steps == 1:
            moved = (replicas - 1) * touched * (ID_BYTES + VECTOR_ELEMENT_BYTES * cols)
            work = replicas * touched * (device.sort_s + VECTOR_ELEMENT_BYTES * cols / device.replica_bw)
        else:
            union = distinct(replicas * steps * ids, rows)
            state = table.state_row_bytes + cols * table.state_element_bytes
            numbers = union * (VECTOR_ELEMENT_BYTES * cols + state)
            moved = (replicas - 1) * (touched * ID_BYTES + 2 / replicas * numbers)
            work = replicas * touched * device.sort_s + 2 * numbers / device.memory_bw
        sent[cost.shard.rank] += moved / steps
        seconds[cost.shard.rank] += (moved / bandwidth + work) / steps
    start = 0.0 if replicas == 1 else 2 * (device.collective_s + device.begin_s) / sync_every
    return Grouped(layout=layout, result=result, sync_bytes=max(sent), sync_s=max(seconds) + start)


def _crosses_hosts(layout: GroupLayout, topology: Topology) -> bool:
    return any(
        len({topology.host_of(rank).first_rank for rank in layout.replicas_of(rank_number)}) > 1
        for rank_number in range(topology.world_size)
    )


def choose_groups(plan: Callable[[Topology], PlanResult], topology: Topology, sync_every: int) -> Grouped:
    """The layout with the shortest predicted step, of all group sizes that divide the world and fit.

    Args:
        plan: plans one group's topology.
        topology: all ranks.

    Raises:
        NoPlanError: no plan fits, even with one group of all ranks.
    """
    world = topology.world_size
    best = grouped(plan(topology), GroupLayout(world, world), topology, sync_every)
    for size in range(world - 1, 0, -1):
        if world % size:
            continue
        layout = GroupLayout(world, size)
        try:
            candidate = grouped(plan(group_topology(topology, layout)), layout, topology, sync_every)
        except NoPlanError:
            break
        best = min(best, candidate, key=lambda each: each.step_s)
    return best
