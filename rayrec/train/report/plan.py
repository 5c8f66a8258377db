"""The sharding plan as HTML: the shards of each rank, its memory and its predicted time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from rayrec._runtime.ranks import ranks_text
from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.planner.report.picture import STORAGE, TERM_COLORS, Drawn, rank_chart, tables_by_rank
from rayrec.distributed.planner.report.text import human_bytes, human_seconds
from rayrec.train.report.run import number
from rayrec.train.report.templates import Column, table

MOST_TABLES = 60  # the largest tables are listed, the others counted
# Key in plan.json → label and color.
MEMORY = {
    "weights_bytes": STORAGE["weights"],
    "optimizer_bytes": STORAGE["optimizer"],
    "dense_bytes": ("dense part", STORAGE["gradients"][1]),
    "map_bytes": ("maps of dynamic ids", STORAGE["ids"][1]),
}
ALWAYS = ("weights_bytes", "optimizer_bytes", "dense_bytes")
TIME_NAMES = {
    "routing_s": "starting exchanges, routing",
    "ids_s": "ids",
    "lookup_s": "lookups",
    "vectors_s": "vectors",
    "gradients_s": "gradients",
    "update_s": "backward and update",
}
TIME = {key: (name, color) for (key, name), color in zip(TIME_NAMES.items(), TERM_COLORS[::-1], strict=False)}
COLUMNS = (
    Column("table"), Column("module", "soft"), Column("rows", "num"), Column("dim", "num"), Column("size", "num"),
    Column("sharding"), Column("kernel"), Column("shards", "num"), Column("ranks"),
)  # fmt: skip


def plan_section(plan: ShardingPlan, table_bits: Mapping[str, int]) -> Markup:
    """The plan as a drawing and a table, sorted by size.

    Args:
        table_bits: bits per weight of tables that are not float32, by name.
    """

    def nbytes(name: str, shape: Sequence[int]) -> int:
        return shape[0] * shape[1] * table_bits.get(name, 32) // 8

    drawn = (
        Drawn(shard.table, sharding.sharding_type, sharding.compute_kernel, shard, nbytes(shard.table, shard.shape))
        for _, sharding, shard in plan.shards()
    )
    listed = [
        (nbytes(name, sharding.shape), name, path, sharding)
        for path, shardings in plan.plan.items()
        for name, sharding in shardings.items()
    ]
    listed.sort(key=lambda row: (-row[0], row[1]))
    cells = [
        [
            *(name, path, f"{sharding.shape[0]:,}", sharding.shape[1], human_bytes(size)),
            *(sharding.sharding_type.replace("_", "-"), sharding.compute_kernel, len(sharding.shards)),
            ranks_text(sorted(set(sharding.ranks))),
        ]
        for size, name, path, sharding in listed[:MOST_TABLES]
    ]
    unlisted = len(listed) - MOST_TABLES
    note = f"<p class='note'>and {unlisted:,} smaller tables</p>" if unlisted > 0 else ""
    return tables_by_rank(drawn, [0, max(1, plan.min_world_size)]) + table(COLUMNS, cells) + Markup(note)


def memory_section(memory: Sequence[Mapping[str, Any]]) -> Markup:
    """A stacked bar per rank: bytes of embedding weights, optimizer state and dense parameters."""
    kinds = {key: kind for key, kind in MEMORY.items() if key in ALWAYS or any(key in rank for rank in memory)}
    return _stacked(memory, kinds, human_bytes, "fullest rank")


def time_section(times: Sequence[Mapping[str, Any]]) -> Markup:
    """A stacked bar per rank: predicted time of the embedding part of a step."""
    note = "the embedding part of a step, predicted by the planner for this device type; not measured"
    return _stacked(times, TIME, human_seconds, "busiest rank", note)


def lookups_section(counts: Sequence[float]) -> Markup:
    """A bar per rank: ids of rank 0's batches that the rank looked up."""
    note = "measured in the last logged steps, by the ids of rank 0's batches"
    ranks = [{"ids": count} for count in counts]
    return _stacked(ranks, {"ids": ("ids", TERM_COLORS[0])}, "{:,.0f}".format, "busiest rank", note)


def _stacked(
    ranks: Sequence[Mapping[str, Any]],
    kinds: Mapping[str, tuple[str, str]],
    show: Callable[[float], str],
    peak_name: str,
    note: str = "",
) -> Markup:
    stacks = [[number(rank, key) or 0.0 for key in kinds] for rank in ranks]
    totals = [sum(stack) for stack in stacks]
    if len(totals) > 1 and any(totals):
        over_mean = f"{peak_name}: {max(totals) * len(totals) / sum(totals):.2f} × the mean"
        note = f"{over_mean}; {note}" if note else over_mean
    peak = {show(max(totals)): max(totals)} if any(totals) else {}
    return rank_chart(stacks, list(kinds.values()), show, peak, note)
