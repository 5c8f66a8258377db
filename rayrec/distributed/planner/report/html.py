"""Draws a plan as one self-contained HTML file: time and memory of every rank, and tables by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from rayrec.distributed.plan.shards import ShardingType
from rayrec.distributed.planner.cost.terms import Cost, ShardBytes
from rayrec.distributed.planner.report.explain import TERM_NAMES, binding, headline
from rayrec.distributed.planner.report.result import PlanResult
from rayrec.distributed.planner.report.shard_costs import ShardCost, shard_costs
from rayrec.distributed.planner.report.text import human_bytes, human_seconds

MOST_TABLES = 400  # maximum drawn; the cheapest tables beyond are only counted
LABEL_W, CHART_W, CHART_H, TOP = 190, 900, 150, 12
TERM_COLORS = ("#3b6fb6", "#8fc1e3", "#4f9dca", "#f2b872", "#e08a2e", "#6a9f58", "#d98cb3", "#b5508a", "#9a9a9a")
STORAGE_NAMES = {
    "weights": "weights",
    "optimizer": "optimizer state",
    "gradients": "dense gradients",
    "ids": "id buffers",
    "vectors": "vector buffers",
    "cache": "UVM cache",
    "reserve": "reserved",
}
STORAGE_COLORS = ("#3b6fb6", "#e08a2e", "#b5508a", "#8fc1e3", "#f2b872", "#6a9f58", "#c4c4c4")
KIND_COLORS = {
    ShardingType.TABLE_WISE.value: "#3b6fb6",
    ShardingType.COLUMN_WISE.value: "#e08a2e",
    ShardingType.TABLE_COLUMN_WISE.value: "#f2b872",
    ShardingType.ROW_WISE.value: "#6a9f58",
    ShardingType.TABLE_ROW_WISE.value: "#a7cf97",
    ShardingType.GRID_SHARD.value: "#b5508a",
    ShardingType.DATA_PARALLEL.value: "#9a9a9a",
}
STYLE = """
body { font: 14px/1.45 system-ui, sans-serif; margin: 24px auto; max-width: 1120px; padding: 0 16px; color: #222; }
h1 { font-size: 20px; } h2 { font-size: 15px; margin: 26px 0 6px; }
pre { white-space: pre-wrap; background: #f6f6f4; padding: 10px 12px; border-radius: 6px; font-size: 13px; }
svg { display: block; overflow: visible; } svg text { font: 11px system-ui, sans-serif; fill: #555; }
.key { display: inline-block; margin-right: 14px; font-size: 12px; color: #555; }
.key i { display: inline-block; width: 11px; height: 11px; margin-right: 5px; border-radius: 2px; }
.wide { overflow-x: auto; }
"""


@dataclass(frozen=True, slots=True)
class _Run:
    """Equal shards of one table on ranks `first` to `last`, drawn as one box."""

    first: int
    last: int
    held: ShardCost
    seconds: float


def write_html(result: PlanResult, path: str | Path, title: str = "sharding plan", explanation: str = "") -> Path:
    """Draw `result` into the file `path`.

    Args:
        explanation: text under the title; default: headline and limits.

    Raises:
        ValueError: the file cannot be written.
    """
    target = Path(path)
    try:
        target.write_text(html_page(result, title, explanation), encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{target}: cannot be written ({error.strerror})") from error
    return target


def html_page(result: PlanResult, title: str = "sharding plan", explanation: str = "") -> str:
    """Return the page; it loads no other resources."""
    text = explanation or f"{headline(result)}\n\n{binding(result)}"
    body = [
        f"<h1>{escape(title)}</h1><pre>{escape(text)}</pre>",
        "<h2>Time of a step by rank (embedding part, predicted)</h2>",
        time_chart(result),
        "<h2>Device memory by rank (predicted)</h2>",
        memory_chart(result),
        "<h2>Tables × ranks</h2>",
        matrix(result),
    ]
    return (
        f"<!doctype html><html lang='en'><meta charset='utf-8'><title>{escape(title)}</title>"
        f"<style>{STYLE}</style><body>{''.join(body)}</body></html>\n"
    )


def time_chart(result: PlanResult) -> str:
    """Draw seconds of every rank, stacked by term, with the lower bound as a line."""
    estimate = result.estimate
    stacks = [[*row, estimate.fixed_s] for row in estimate.cost_RT.tolist()]
    names = [TERM_NAMES[name] for name in Cost._fields] + ["collectives and routing"]
    colors = [*TERM_COLORS, "#555555"]
    top = max(estimate.worst_s, 1e-12)
    lines = {f"lower bound {human_seconds(result.bound_s)}": result.bound_s}
    return _legend(names, colors, stacks) + _bars(stacks, colors, names, top, lines, human_seconds)


def memory_chart(result: PlanResult) -> str:
    """Draw device bytes of every rank, stacked by kind, with the ranks' memory as a line."""
    estimate = result.estimate
    stacks = [
        [*held[:-1], reserved]
        for held, reserved in zip(estimate.storage_RT.tolist(), estimate.reserve_R.tolist(), strict=True)
    ]
    names = [STORAGE_NAMES[name] for name in ShardBytes._fields[:-1]] + [STORAGE_NAMES["reserve"]]
    sizes = {host.memory_bytes for host in result.topology.hosts}
    lines = {f"memory {human_bytes(size)}": float(size) for size in sizes}
    top = max([*lines.values(), *(sum(stack) for stack in stacks)])
    return _legend(names, STORAGE_COLORS, stacks) + _bars(stacks, STORAGE_COLORS, names, top, lines, human_bytes)


def _legend(names: Sequence[str], colors: Sequence[str], stacks: Sequence[Sequence[float]]) -> str:
    used = [max(stack[i] for stack in stacks) > 0 for i in range(len(names))]
    return "".join(_key(name, color) for name, color, use in zip(names, colors, used, strict=True) if use)


def _key(name: str, color: str) -> str:
    return f"<span class='key'><i style='background:{color}'></i>{escape(name)}</span>"


def _bars(
    stacks: Sequence[Sequence[float]],
    colors: Sequence[str],
    names: Sequence[str],
    top: float,
    lines: Mapping[str, float],
    show: Callable[[float], str],
) -> str:
    step = CHART_W / len(stacks)
    width = max(1.0, step * 0.86 if len(stacks) <= 64 else step)
    parts = []
    for rank, stack in enumerate(stacks):
        y, tip = float(TOP + CHART_H), f"rank {rank}: {show(sum(stack))}"
        boxes = []
        for value, color, name in zip(stack, colors, names, strict=True):
            height = value / top * CHART_H
            if height < 0.05:
                continue
            y -= height
            tip += f"\n{name}: {show(value)}"
            x = LABEL_W + rank * step
            boxes.append(f"<rect x='{x:.1f}' y='{y:.1f}' width='{width:.1f}' height='{height:.1f}' fill='{color}'/>")
        parts.append(f"<g><title>{escape(tip)}</title>{''.join(boxes)}</g>")
    for name, value in lines.items():
        y = TOP + CHART_H * (1 - value / top)
        parts.append(
            f"<line x1='{LABEL_W}' x2='{LABEL_W + CHART_W}' y1='{y:.1f}' y2='{y:.1f}' stroke='#c0392b' "
            f"stroke-dasharray='4 3'/><text x='{LABEL_W - 6}' y='{y + 4:.1f}' text-anchor='end'>{escape(name)}</text>"
        )
    parts.append(_rank_numbers(len(stacks), TOP + CHART_H + 14))
    return (
        f"<div class='wide'><svg width='{LABEL_W + CHART_W}' height='{TOP + CHART_H + 20}'>{''.join(parts)}</svg></div>"
    )


def _rank_numbers(count: int, y: float) -> str:
    step, every = CHART_W / count, max(1, -(-count // 32))
    return "".join(
        f"<text x='{LABEL_W + (rank + 0.43) * step:.1f}' y='{y}' text-anchor='middle'>{rank}</text>"
        for rank in range(0, count, every)
    )


def matrix(result: PlanResult) -> str:
    """Draw one line per table and one column per rank; boxes are shards, darker with higher cost."""
    by_table: dict[tuple[str, str], list[ShardCost]] = {}
    for held in shard_costs(result):
        by_table.setdefault(held.key, []).append(held)
    order = sorted(by_table, key=lambda key: (-sum(held.cost.total for held in by_table[key]), key))
    shown, left = order[:MOST_TABLES], len(order) - MOST_TABLES
    world, height = result.topology.world_size, 16 if len(shown) <= 60 else 7
    step, heaviest = CHART_W / world, max((p.cost.total for each in by_table.values() for p in each), default=1.0)
    parts = [_rank_numbers(world, 10)]
    for line, key in enumerate(shown):
        y = 18 + line * height
        if height > 10:
            label = by_table[key][0].label
            short = label if len(label) <= 26 else f"…{label[-25:]}"
            parts.append(f"<text x='{LABEL_W - 6}' y='{y + 11}' text-anchor='end'>{escape(short)}</text>")
        parts += [_box(run, y, height, step, heaviest) for run in _runs(by_table[key])]
    kinds = dict.fromkeys(held[0].sharding_type for held in by_table.values())
    legend = "".join(_key(kind.replace("_", "-"), KIND_COLORS[kind]) for kind in kinds)
    note = f"<p>and {left} tables that cost less</p>" if left > 0 else ""
    size = f"width='{LABEL_W + CHART_W}' height='{24 + len(shown) * height}'"
    drawn = _host_lines(result, step, 18, len(shown) * height) + "".join(parts)
    return f"{legend}<div class='wide'><svg {size}>{drawn}</svg></div>{note}"


def _host_lines(result: PlanResult, step: float, y: float, height: float) -> str:
    edges = [host.first_rank for host in result.topology.hosts] + [result.topology.world_size]
    return "".join(
        f"<line x1='{LABEL_W + edge * step:.1f}' x2='{LABEL_W + edge * step:.1f}' y1='{y}' y2='{y + height}' "
        "stroke='#ddd'/>"
        for edge in edges
    )


def _runs(shards: Iterable[ShardCost]) -> list[_Run]:
    runs: list[_Run] = []
    for held in sorted(shards, key=lambda each: (each.shard.rank, each.shard)):
        last = runs[-1] if runs else None
        rank = held.shard.rank
        if last and rank == last.last:
            runs[-1] = _Run(last.first, last.last, last.held, last.seconds + held.cost.total)
        elif last and rank == last.last + 1 and _equal(last.held, held):
            runs[-1] = _Run(last.first, rank, last.held, last.seconds)
        else:
            runs.append(_Run(rank, rank, held, held.cost.total))
    return runs


def _equal(first: ShardCost, second: ShardCost) -> bool:
    return first.shard.shape == second.shard.shape and abs(first.cost.total - second.cost.total) < 1e-15


def _box(run: _Run, y: float, height: float, step: float, heaviest: float) -> str:
    shard, ranks = run.held.shard, f"{run.first}" if run.first == run.last else f"{run.first} to {run.last}"
    tip = (
        f"{run.held.label} on rank {ranks}\n{run.held.sharding_type}, {run.held.kernel}\n"
        f"rows {shard.rows.size:,} x columns {shard.cols.size}\n{human_seconds(run.seconds)} a step, "
        f"{human_bytes(run.held.storage.device)}"
    )
    opacity = 0.35 + 0.65 * min(1.0, run.seconds / heaviest)
    width = max(1.0, (run.last - run.first + 1) * step - (1.5 if step > 6 else 0))
    return (
        f"<rect x='{LABEL_W + run.first * step:.1f}' y='{y}' width='{width:.1f}' height='{height - 2}' "
        f"fill='{KIND_COLORS[run.held.sharding_type]}' fill-opacity='{opacity:.2f}'>"
        f"<title>{escape(tip)}</title></rect>"
    )
