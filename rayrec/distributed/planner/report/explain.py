"""Explains a plan as text: load of every rank, limiting resources, changes that would help."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from rayrec.distributed.planner.cost.estimate import Estimate
from rayrec.distributed.planner.cost.memory import RESERVE_SHARE
from rayrec.distributed.planner.cost.terms import Cost
from rayrec.distributed.planner.report.result import PlanResult
from rayrec.distributed.planner.report.shard_costs import ShardCost, shard_costs
from rayrec.distributed.planner.report.text import LIGHT, bar, columns, human_bytes, human_seconds
from rayrec.distributed.planner.search.what_if import Change, attempt, halved, unconstrained
from rayrec.distributed.planner.tables.table import Table

SHOWN_RANKS = 32  # with more ranks, show only the slowest and the least loaded
MIN_GAIN = 0.02
TRIALS = 4
TRIAL_BUDGET = 200_000  # maximum tables x ranks planned again for advice
TERM_NAMES = {
    "lookup": "lookups",
    "input_intra": "ids inside the host",
    "input_inter": "ids between hosts",
    "output_intra": "vectors inside the host",
    "output_inter": "vectors between hosts",
    "backward": "backward and update",
    "gradient_intra": "gradients inside the host",
    "gradient_inter": "gradients between hosts",
    "host": "host overhead",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """A change and the share by which it reduces the slowest rank."""

    text: str
    gain: float


def explain(result: PlanResult, with_advice: bool = True) -> str:
    """The plan's quality, loads by rank, limits and advice as text.

    Args:
        with_advice: try changes; each is planned again.
    """
    sections = [headline(result), loads_text(result), binding(result)]
    if with_advice:
        lines = [f"- {a.text} lowers the worst rank by {a.gain:.0%}" for a in advice(result)]
        sections.append("What would help:\n" + ("\n".join(lines) or f"- nothing tried lowers it by {MIN_GAIN:.0%}"))
    return "\n\n".join(sections)


def headline(result: PlanResult) -> str:
    """Ranks, slowest rank, distance from the bound, and balance."""
    estimate, topology = result.estimate, result.topology
    sizes = sorted({host.num_ranks for host in topology.hosts})
    world = f"{topology.world_size} ranks ({len(topology.hosts)} x {'/'.join(map(str, sizes))}, {topology.device.kind})"
    gap = f"{max(0.0, result.gap):.1%} above the lower bound {human_seconds(result.bound_s)}"
    return (
        f"{len(result.tables)} tables on {world}: worst rank {estimate.worst_rank} at "
        f"{human_seconds(estimate.worst_s)} a step, at most {gap}\n"
        f"lookup load: worst / mean {estimate.lookup_ratio:.2f}; starting collectives and routing ids costs "
        f"every rank {human_seconds(estimate.fixed_s)} a step"
    )


def loads_text(result: PlanResult) -> str:
    """Seconds and bytes of every rank as bars; with many ranks, only the slowest and the least loaded."""
    estimate = result.estimate
    seconds_R, tables_R, reserve_R = estimate.seconds_R, estimate.tables_R, estimate.reserve_R
    memory = _memory(result)
    order = sorted(range(len(memory)), key=lambda rank: (-seconds_R[rank], rank))
    ranks = sorted(order) if len(order) <= SHOWN_RANKS else order[:8] + order[-4:]
    with_host = bool(estimate.host_bytes_R.any())
    rows = [
        (
            str(rank),
            bar(seconds_R[rank] / estimate.worst_s if estimate.worst_s else 0.0),
            human_seconds(float(seconds_R[rank])),
            bar(tables_R[rank] / memory[rank], light=reserve_R[rank] / memory[rank]),
            human_bytes(float(tables_R[rank])),
            human_bytes(float(reserve_R[rank])),
            human_bytes(memory[rank]),
            *([human_bytes(float(estimate.host_bytes_R[rank]))] if with_host else []),
        )
        for rank in ranks
    ]
    head = ("rank", "time", "", "device memory", "tables", "reserved", "of", *(["host memory"] if with_host else []))
    text = columns(head, rows, frozenset({0, 2, 4, 5, 6, 7}))
    omitted = len(memory) - len(ranks)
    if omitted:
        text += f"\n(the 8 worst and the 4 least loaded; {omitted} more in between)"
    return f"{text}\n({LIGHT} reserved: the dense part, the rank's batch, and {RESERVE_SHARE:.0%} for everything else)"


def _memory(result: PlanResult) -> list[int]:
    """The device bytes of every rank."""
    return [host.memory_bytes for host in result.topology.hosts for _ in host.ranks]


def binding(result: PlanResult) -> str:
    """The resources and tables that limit the slowest rank and the fullest rank."""
    return "What binds:\n" + "\n".join(f"- {line}" for line in (_time_binds(result), _memory_binds(result)))


def _time_binds(result: PlanResult) -> str:
    estimate, worst = result.estimate, result.estimate.worst_rank
    terms = dict(zip(Cost._fields, estimate.cost_RT[worst].tolist(), strict=True))
    top = sorted(terms, key=lambda name: -terms[name])[:2]
    total = float(estimate.seconds_R[worst]) or 1.0
    shares = ", ".join(f"{TERM_NAMES[name]} {terms[name] / total:.0%}" for name in top)
    if estimate.fixed_s > terms[top[0]]:
        shares = f"collectives and routing {estimate.fixed_s / total:.0%}, {shares}"
    heavy = sorted(shard_costs(result, worst), key=lambda each: -each.cost.total)[:3]
    return f"time: rank {worst} ({shares}); heaviest there: {_named(heavy, total)}"


def _named(heavy: Sequence[ShardCost], total: float) -> str:
    return ", ".join(f"{p.label!r} ({p.sharding_type}) {p.cost.total / total:.0%}" for p in heavy) or "nothing"


def _memory_binds(result: PlanResult) -> str:
    estimate = result.estimate
    available_R = [total - float(reserved) for total, reserved in zip(_memory(result), estimate.reserve_R, strict=True)]
    shares = [float(used) / max(1.0, available) for used, available in zip(estimate.tables_R, available_R, strict=True)]
    fullest = max(range(len(shares)), key=lambda rank: (shares[rank], -rank))
    heavy = sorted(shard_costs(result, fullest), key=lambda each: -each.storage.device)[:3]
    named = ", ".join(f"{p.label!r} {human_bytes(p.storage.device)}" for p in heavy) or "nothing"
    usage = f"{human_bytes(float(estimate.tables_R[fullest]))} of {human_bytes(available_R[fullest])}"
    share = f"{shares[fullest]:.0%} of the memory for tables on rank {fullest}"
    return f"memory: tables use {share} ({usage}); largest there: {named}"


def advice(result: PlanResult) -> list[Advice]:
    """Changes that reduce the slowest rank by 2 % or more, best first; each is planned."""
    estimate: Estimate = result.estimate
    trials = TRIALS if len(result.tables) * result.topology.world_size <= TRIAL_BUDGET // TRIALS else 1
    advices = []
    for change, table in islice(_changes(result), trials):
        tried = attempt(change, result.dense_bytes)
        if tried is None or tried.worst_s > estimate.worst_s * (1 - MIN_GAIN):
            continue
        text = change.text
        if table is not None:
            text = (
                f"{tried.sharding_of[table.key].replace('_', '-')} for {table.label!r}, which its constraints forbid,"
            )
        advices.append(Advice(text=text, gain=1 - tried.worst_s / estimate.worst_s))
    return sorted(advices, key=lambda each: -each.gain)


def _changes(result: PlanResult) -> Iterator[tuple[Change, Table | None]]:
    topology, tables = result.topology, result.tables
    by_key = {table.key: table for table in tables}
    heavy = sorted(shard_costs(result, result.estimate.worst_rank), key=lambda each: -each.cost.total)
    for key in dict.fromkeys(cost.key for cost in heavy[:3]):
        table = by_key[key]
        freed = unconstrained(table, topology)
        if freed != table:
            changed = tuple(freed if t.key == key else t for t in tables)
            yield Change(text="", tables=changed, topology=topology), table
    yield Change(text="planning again", tables=tuple(tables), topology=topology), None
    freed_all = tuple(unconstrained(t, topology) for t in tables)
    if freed_all != tuple(tables):
        text = "dropping all constraints on sharding types, kernels and ranks"
        yield Change(text=text, tables=freed_all, topology=topology), None
    if any(t.element_bytes == 4 for t in tables):
        yield Change(text="data_type FP16 for all tables", tables=halved(tables), topology=topology), None
