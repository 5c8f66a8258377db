"""How a plan's pooled vectors cross hosts."""

from __future__ import annotations

from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import ShardingType
from rayrec.distributed.planner.machine.topology import Topology


def exchange_text(plan: ShardingPlan, topology: Topology) -> str:
    """One line: how the plan's vectors cross hosts, and why."""
    hosts = topology.hosts
    if len(hosts) == 1:
        return "one exchange among all ranks: they share a host"
    if all(host.num_ranks == 1 for host in hosts):
        return "one exchange among all ranks: each host has one"
    sizes = {host.num_ranks for host in hosts}
    if len(sizes) > 1:
        counts = ", ".join(str(host.num_ranks) for host in hosts)
        return (
            f"one exchange among all ranks: hosts have unequal numbers of them ({counts}), so none adds up partial sums"
        )
    cut = _cut_inside_hosts(plan, topology)
    if not cut:
        return "one exchange among all ranks: no host holds several row blocks of a table with partial sums to add"
    names = ", ".join(cut[:3]) + (f" and {len(cut) - 3} more" if len(cut) > 3 else "")
    return f"partial sums are added inside each host before they cross to another, where that saves enough: {names}"


def _cut_inside_hosts(plan: ShardingPlan, topology: Topology) -> list[str]:
    """The tables with several row blocks of the same columns on one host."""
    host_of = [number for number, host in enumerate(topology.hosts) for _ in host.ranks]
    names = []
    for sharded in plan.plan.values():
        for name, sharding in sharded.items():
            if sharding.sharding_type == ShardingType.DATA_PARALLEL.value:
                continue
            blocks = [(host_of[shard.rank], shard.cols.start) for shard in sharding.shards if shard.rows.size]
            if len(set(blocks)) < len(blocks):
                names.append(name)
    return names
