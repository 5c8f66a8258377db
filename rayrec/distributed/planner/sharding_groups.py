"""Planning for sharding groups that are replicated: the machine of one group, what synchronisation costs, how many.

A group is planned for as a cluster of its own. What its ranks exchange with their replicas comes on top.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rayrec.distributed.comm.wire import ID_BYTES, VECTOR_ELEMENT_BYTES
from rayrec.distributed.plan.shards import ShardingType
from rayrec.distributed.planner.cost.seconds import distinct
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.report.result import NoPlanError, PlanResult
from rayrec.distributed.planner.report.shard_costs import pieces
from rayrec.distributed.replicas.layout import GroupLayout


@dataclass(frozen=True, kw_only=True)
class Grouped:
    """A plan for one sharding group, of which there are several.

    Args:
        layout: the groups.
        result: the plan of each.
        sync_bytes: that the busiest rank sends to its replicas, on average of all steps; all of its kind alike.
        sync_s: predicted seconds of a step's synchronisation, likewise.
    """

    layout: GroupLayout
    result: PlanResult
    sync_bytes: float
    sync_s: float

    @property
    def step_s(self) -> float:
        """Predicted seconds of the embedding part of a step on the slowest rank, with synchronisation."""
        return self.result.estimate.worst_s + self.sync_s


def group_topology(topology: Topology, layout: GroupLayout) -> Topology:
    """The machine of one group: that of the group which is on most hosts, each host with the least memory of any.

    Raises:
        ValueError: the layout is for another world.
    """
    if layout.world_size != topology.world_size:
        raise ValueError(f"the layout has {layout.world_size} ranks, but the topology {topology.world_size}")
    if layout.replicas == 1:
        return topology
    host_of = {rank: place for place, host in enumerate(topology.hosts) for rank in host.ranks}
    sizes: list[int] = []
    for first in range(layout.replicas):
        ranks = layout.group_of(first if layout.strided else first * layout.group_size)
        on_hosts: dict[int, int] = {}
        for rank in ranks:
            on_hosts[host_of[rank]] = on_hosts.get(host_of[rank], 0) + 1
        if len(on_hosts) > len(sizes):
            sizes = list(on_hosts.values())
    memory = min(host.memory_bytes for host in topology.hosts)
    beside = min(host.host_bytes for host in topology.hosts)
    cpu = topology.compute_device == "cpu"
    caps = {"ddr_cap": memory} if cpu else {"hbm_cap": memory, "ddr_cap": beside or None}
    group = Topology(layout.group_size, topology.compute_device, hosts=sizes, **caps)
    return group.with_device(topology.device)


def grouped(result: PlanResult, layout: GroupLayout, topology: Topology, sync_every: int) -> Grouped:
    """The plan of a group with what synchronisation adds to it.

    With n touched rows of c columns on a rank (`distinct` of the group's ids), R groups, s bytes of optimizer state:

    - every step: (R - 1) n (8 + 4 c) bytes; each replica then sorts and adds up all R n rows
    - every N steps: of the rows touched since then their numbers, (R - 1) n 8 bytes, and of the union over groups an
      all-reduce of weights and state, 2 (R - 1) / R bytes for each of u (4 c + s)

    Data-parallel tables meet in every step.
    """
    replicas, device = layout.replicas, topology.device
    tables = {table.key: table for table in result.tables}
    sent, seconds = [0.0] * layout.group_size, [0.0] * layout.group_size
    bandwidth = device.inter_host_bw if _crosses_hosts(layout, topology) else device.intra_host_bw
    for piece in pieces(result) if replicas > 1 else ():
        table, (rows, cols) = tables[piece.key], piece.shard.shape
        ids = table.ids * rows / table.rows
        steps = 1 if piece.sharding_type == ShardingType.DATA_PARALLEL.value else sync_every
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
        sent[piece.shard.rank] += moved / steps
        seconds[piece.shard.rank] += (moved / bandwidth + work) / steps
    start = 0.0 if replicas == 1 else 2 * (device.collective_s + device.begin_s) / sync_every
    return Grouped(layout=layout, result=result, sync_bytes=max(sent), sync_s=max(seconds) + start)


def _crosses_hosts(layout: GroupLayout, topology: Topology) -> bool:
    return any(
        len({topology.host_of(rank).first_rank for rank in layout.replicas_of(first)}) > 1
        for first in range(topology.world_size)
    )


def choose_groups(plan: Callable[[Topology], PlanResult], topology: Topology, sync_every: int) -> Grouped:
    """The number of groups whose predicted step is the shortest, of those that divide the world and hold the tables.

    Args:
        plan: plans for the machine of a group.
        topology: of all ranks.

    Raises:
        NoPlanError: nothing fits, not even one group of all ranks.
    """
    world = topology.world_size
    best = grouped(plan(topology), GroupLayout(world, world), topology, sync_every)
    for size in range(world - 1, 0, -1):
        if world % size:
            continue
        layout = GroupLayout(world, size)
        try:
            found = grouped(plan(group_topology(topology, layout)), layout, topology, sync_every)
        except NoPlanError:
            break  # smaller groups hold less
        best = min(best, found, key=lambda each: each.step_s)
    return best
