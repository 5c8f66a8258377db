"""The sharding plan as HTML: who holds which rectangle of which table, and each rank's memory and predicted time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import ParameterSharding, Shard
from rayrec.distributed.planner.report.text import human_bytes, human_seconds

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
Kinds = Sequence[tuple[str, str, str]]


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


def plan_section(plan: ShardingPlan, table_bits: Mapping[str, int]) -> str:
    """The plan as a picture and as a table, its tables by size; `table_bits` has those that are not float32."""
    tables = [
        _Table(module, name, sharding, table_bits.get(name, 32))
        for module, found in plan.plan.items()
        for name, sharding in found.items()
    ]
    tables.sort(key=lambda table: (-table.bytes, table.name))
    shown = tables[:MOST_TABLES]
    left_out = _and_more(len(tables) - len(shown), "smaller tables")
    kinds = sorted({table.sharding.sharding_type for table in tables})
    legend = "".join(_key(kind) for kind in kinds)
    return (
        f"<div class='legend'>{legend}<span class='note'>each box is a whole table, rows downward; "
        f"the coloured part is what the rank holds</span></div>"
        f"<div class='wide'>{_picture(shown, plan.min_world_size)}</div>"
        f"<div class='wide'>{_plan_table(shown)}</div>{left_out}"
    )


def _picture(tables: Sequence[_Table], world_size: int) -> str:
    ranks = min(world_size, MOST_RANKS)
    box_w = 120 if ranks <= 4 else 64 if ranks <= 8 else 36 if ranks <= 16 else 14
    box_h, gap, label_w, head = 30, 8 if ranks <= 16 else 3, 210, 24
    width, height = label_w + ranks * (box_w + gap), head + len(tables) * (box_h + gap)
    parts = []
    for rank in range(ranks):
        x = label_w + rank * (box_w + gap) + box_w / 2
        text = f"rank {rank}" if box_w > 36 or rank == 0 else str(rank)
        parts.append(f"<text class='tick' x='{x}' y='14' text-anchor='middle'>{text}</text>")
    for row, table in enumerate(tables):
        y = head + row * (box_h + gap)
        rows, dim = table.sharding.shape
        name = table.name if len(table.name) <= 24 else table.name[:23] + "…"
        parts.append(f"<text class='name' x='0' y='{y + 13}'>{escape(name)}</text>")
        parts.append(f"<text class='tick' x='0' y='{y + 27}'>{rows:,} × {dim} · {human_bytes(table.bytes)}</text>")
        for rank in range(ranks):
            x = label_w + rank * (box_w + gap)
            parts.append(f"<rect class='box' x='{x}' y='{y}' width='{box_w}' height='{box_h}' rx='3'/>")
        for shard in table.sharding.shards:
            if shard.rank < ranks:
                parts.append(_rectangle(table, shard, label_w + shard.rank * (box_w + gap), y, box_w, box_h))
    svg = f"<svg class='plan' width='{width}' height='{height}' viewBox='0 0 {width} {height}'>{''.join(parts)}</svg>"
    return svg + _and_more(world_size - ranks, "more ranks")


def _rectangle(table: _Table, shard: Shard, x: float, y: float, box_w: float, box_h: float) -> str:
    rows, dim = table.sharding.shape
    left, top = x + shard.cols.start / dim * box_w, y + shard.rows.start / rows * box_h
    width, height = max(3.0, shard.cols.size / dim * box_w), max(3.0, shard.rows.size / rows * box_h)
    title = f"{table.name} on rank {shard.rank}: rows {shard.rows}, columns {shard.cols}"
    return (
        f"<rect class='shard {escape(table.sharding.sharding_type)}' x='{left:.1f}' y='{top:.1f}' width='{width:.1f}' "
        f"height='{height:.1f}' rx='2'><title>{escape(title)}</title></rect>"
    )


def _plan_table(tables: Sequence[_Table]) -> str:
    rows = []
    for table in tables:
        num_rows, dim = table.sharding.shape
        kind = table.sharding.sharding_type
        rows.append(
            f"<tr><td>{escape(table.name)}</td><td class='soft'>{escape(table.module)}</td>"
            f"<td class='num'>{num_rows:,}</td><td class='num'>{dim}</td>"
            f"<td class='num'>{human_bytes(table.bytes)}</td><td>{_key(kind)}</td>"
            f"<td>{escape(table.sharding.compute_kernel)}</td><td class='num'>{len(table.sharding.shards)}</td>"
            f"<td>{escape(rank_text(sorted(set(table.sharding.ranks))))}</td></tr>"
        )
    head = "".join(
        f"<th{' class=num' if name in NUMERIC else ''}>{name}</th>"
        for name in ("table", "module", "rows", "dim", "size", "sharding", "kernel", "shards", "ranks")
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table>"


NUMERIC = {"rows", "dim", "size", "shards"}


def memory_section(memory: Sequence[Mapping[str, Any]]) -> str:
    """A stacked bar for each rank: embedding weights, optimizer state, dense part."""
    return _stacked(memory, KINDS_OF_MEMORY, human_bytes, "fullest rank")


def time_section(times: Sequence[Mapping[str, Any]]) -> str:
    """A stacked bar for each rank: what the planner expects of the embedding part of a step."""
    note = "<p class='note'>the embedding part of a step, from the planner's figures for such devices; not measured</p>"
    return _stacked(times, KINDS_OF_TIME, human_seconds, "busiest rank") + note


def _stacked(ranks: Sequence[Mapping[str, Any]], kinds: Kinds, show: Callable[[float], str], most_is: str) -> str:
    bars = [(entry.get("rank", i), [_number(entry, key) for key, _, _ in kinds]) for i, entry in enumerate(ranks)]
    totals = [sum(parts) for _, parts in bars]
    most = max(totals, default=0) or 1
    legend = "".join(f"<span class='key {css}'>{name}</span>" for _, css, name in kinds)
    if len(bars) > 1 and any(totals):
        legend += f"<span class='note'>{most_is}: {most / (sum(totals) / len(totals)):.2f} × the mean</span>"
    drawn = "".join(_bar(rank, parts, kinds, most, show) for rank, parts in bars[:MOST_RANKS])
    more = _and_more(len(bars) - MOST_RANKS, "more ranks")
    return f"<div class='legend'>{legend}</div><div class='bars'>{drawn}</div>{more}"


def _bar(rank: object, parts: Sequence[float], kinds: Kinds, most: float, show: Callable[[float], str]) -> str:
    drawn = "".join(
        f"<i class='{css}' style='width:{part / most * 100:.2f}%' title='{name}: {show(part)}'></i>"
        for (_, css, name), part in zip(kinds, parts, strict=True)
        if part
    )
    label, total = escape(str(rank)), show(sum(parts))
    return f"<div class='bar'><b>rank {label}</b><div>{drawn}</div><span>{total}</span></div>"


def _number(entry: Mapping[str, Any], key: str) -> float:
    value = entry.get(key, 0)
    return value if isinstance(value, int | float) else 0


def _key(sharding_type: str) -> str:
    return f"<span class='key {escape(sharding_type)}'>{escape(sharding_type.replace('_', '-'))}</span>"


def _and_more(count: int, what: str) -> str:
    return f"<p class='note'>and {count:,} {what}</p>" if count > 0 else ""


def rank_text(ranks: Sequence[int]) -> str:
    """`0, 1, 4`, or `0–7` where they are many and follow each other."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}–{ranks[-1]}"
    return ", ".join(map(str, ranks))
