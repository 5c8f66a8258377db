"""The sharding plan as HTML: who holds which rectangle of which table, and each rank's memory and predicted time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import ParameterSharding
from rayrec.distributed.planner.report.text import human_bytes, human_seconds
from rayrec.train.driver.plan_table import ranks_text
from rayrec.train.report.run import number
from rayrec.train.report.templates import Column, render, table

MOST_TABLES = 60  # in picture and table; the smaller ones are only counted
MOST_RANKS = 64  # in the picture
KINDS_OF_MEMORY = (  # key in plan.json, CSS class, name
    ("weights_bytes", "weights", "embedding weights"),
    ("optimizer_bytes", "optimizer", "optimizer state"),
    ("dense_bytes", "dense", "dense part"),
)
KINDS_OF_TIME = (
    ("routing_s", "routing", "starting exchanges, routing"),
    ("ids_s", "ids", "ids"),
    ("lookup_s", "lookup", "lookups"),
    ("vectors_s", "vectors", "vectors"),
    ("gradients_s", "gradients", "gradients"),
    ("update_s", "update", "backward and update"),
)
COLUMNS = (
    Column("table"), Column("module", "soft"), Column("rows", "num"), Column("dim", "num"), Column("size", "num"),
    Column("sharding"), Column("kernel"), Column("shards", "num"), Column("ranks"),
)  # fmt: skip
Kinds = Sequence[tuple[str, str, str]]
LABEL_W, HEAD_H, BOX_H = 210, 24, 30  # of the picture


@dataclass(frozen=True, slots=True)
class _Table:
    module: str
    name: str
    sharding: ParameterSharding
    bits: int  # of one weight

    @property
    def bytes(self) -> int:
        rows, dim = self.sharding.shape
        return rows * dim * self.bits // 8

    @property
    def kind(self) -> str:
        return self.sharding.sharding_type

    @property
    def size(self) -> str:
        rows, dim = self.sharding.shape
        return f"{rows:,} × {dim} · {human_bytes(self.bytes)}"

    def cells(self) -> list[object]:
        rows, dim = self.sharding.shape
        kind = Markup("<span class='key {}'>{}</span>").format(self.kind, self.kind.replace("_", "-"))
        of = self.sharding
        ranks = ranks_text(sorted(set(of.ranks)))
        size = human_bytes(self.bytes)
        return [self.name, self.module, f"{rows:,}", dim, size, kind, of.compute_kernel, len(of.shards), ranks]


def plan_section(plan: ShardingPlan, table_bits: Mapping[str, int]) -> Markup:
    """The plan as a picture and as a table, its tables by size; `table_bits` has those that are not float32."""
    tables = [
        _Table(module, name, sharding, table_bits.get(name, 32))
        for module, found in plan.plan.items()
        for name, sharding in found.items()
    ]
    tables.sort(key=lambda table: (-table.bytes, table.name))
    shown, ranks = tables[:MOST_TABLES], min(plan.min_world_size, MOST_RANKS)
    box_w = 120 if ranks <= 4 else 64 if ranks <= 8 else 36 if ranks <= 16 else 14
    gap = 8 if ranks <= 16 else 3
    boxes = [LABEL_W + rank * (box_w + gap) for rank in range(ranks)]
    texts = [f"rank {rank}" if box_w > 36 or rank == 0 else str(rank) for rank in range(ranks)]
    ys = [HEAD_H + row * (BOX_H + gap) for row in range(len(shown))]
    return render(
        "plan",
        kinds=sorted({table.kind for table in tables}),
        width=LABEL_W + ranks * (box_w + gap),
        height=HEAD_H + len(shown) * (BOX_H + gap),
        heads=[(x + box_w / 2, text) for x, text in zip(boxes, texts, strict=True)],
        tables=[(of, y, _rectangles(of, boxes, y, box_w)) for of, y in zip(shown, ys, strict=True)],
        boxes=boxes,
        box_w=box_w,
        box_h=BOX_H,
        listed=table(COLUMNS, [of.cells() for of in shown]),
        more_ranks=plan.min_world_size - ranks,
        more_tables=len(tables) - len(shown),
    )


def _rectangles(of: _Table, boxes: Sequence[float], y: float, box_w: float) -> list[dict[str, Any]]:
    """What the ranks that have a box hold of a table."""
    rows, dim = of.sharding.shape
    return [
        {
            "x": boxes[shard.rank] + shard.cols.start / dim * box_w,
            "y": y + shard.rows.start / rows * BOX_H,
            "width": max(3.0, shard.cols.size / dim * box_w),
            "height": max(3.0, shard.rows.size / rows * BOX_H),
            "title": f"{of.name} on rank {shard.rank}: rows {shard.rows}, columns {shard.cols}",
        }
        for shard in of.sharding.shards
        if shard.rank < len(boxes)
    ]


def memory_section(memory: Sequence[Mapping[str, Any]]) -> Markup:
    """A stacked bar for each rank: embedding weights, optimizer state, dense part."""
    return _stacked(memory, KINDS_OF_MEMORY, human_bytes, "fullest rank")


def time_section(times: Sequence[Mapping[str, Any]]) -> Markup:
    """A stacked bar for each rank: what the planner expects of the embedding part of a step."""
    note = "the embedding part of a step, from the planner's figures for such devices; not measured"
    return _stacked(times, KINDS_OF_TIME, human_seconds, "busiest rank", note)


def _stacked(
    ranks: Sequence[Mapping[str, Any]], kinds: Kinds, show: Callable[[float], str], most_is: str, note: str = ""
) -> Markup:
    bars = [(of.get("rank", i), {key: number(of, key) or 0.0 for key, _, _ in kinds}) for i, of in enumerate(ranks)]
    totals = [sum(parts.values()) for _, parts in bars]
    most = max(totals, default=0) or 1
    over_mean = most / (sum(totals) / len(totals)) if len(bars) > 1 and any(totals) else None
    return render(
        "bars",
        bars=bars[:MOST_RANKS],
        more=len(bars) - MOST_RANKS,
        kinds=kinds,
        most=most,
        over_mean=over_mean,
        most_is=most_is,
        show=show,
        note=note,
    )
