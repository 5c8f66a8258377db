"""Draws a plan as one self-contained HTML file: time and memory of every rank, and tables by rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

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


@dataclass(frozen=True, slots=True)
class _Box:
    """Equal shards of one table on ranks `first` to `last`."""

    first: int
    last: int
    held: ShardCost
    seconds: float

    @property
    def color(self) -> str:
        return KIND_COLORS[self.held.sharding_type]

    @property
    def tip(self) -> str:
        shard, ranks = self.held.shard, f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        return (
            f"{self.held.label} on rank {ranks}\n{self.held.sharding_type}, {self.held.kernel}\n"
            f"rows {shard.rows.size:,} x columns {shard.cols.size}\n{human_seconds(self.seconds)} a step, "
            f"{human_bytes(self.held.storage.device)}"
        )

    def width(self, step: float) -> float:
        return max(1.0, (self.last - self.first + 1) * step - (1.5 if step > 6 else 0))


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
    """Return the page, `plan.html` filled in; it loads no other resources."""
    by_table: dict[tuple[str, str], list[ShardCost]] = {}
    for held in shard_costs(result):
        by_table.setdefault(held.key, []).append(held)
    seconds = {key: sum(held.cost.total for held in by_table[key]) for key in by_table}
    shown = sorted(by_table, key=lambda key: (-seconds[key], key))[:MOST_TABLES]
    kinds = dict.fromkeys(held[0].sharding_type for held in by_table.values())
    world = result.topology.world_size
    step = CHART_W / world
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    ).from_string(Path(__file__).with_name("plan.html").read_text("utf-8"))
    return page.render(
        title=title,
        text=explanation or f"{headline(result)}\n\n{binding(result)}",
        charts=[_time_chart(result), _memory_chart(result)],
        left=LABEL_W,
        width=CHART_W,
        bottom=TOP + CHART_H,
        step=step,
        bar_width=max(1.0, step * 0.86 if world <= 64 else step),
        every=max(1, -(-world // 32)),
        ranks=world,
        kinds=[(kind.replace("_", "-"), KIND_COLORS[kind]) for kind in kinds],
        edges=[*(host.first_rank for host in result.topology.hosts), world],
        tables=[(by_table[key][0].label, _boxes(by_table[key])) for key in shown],
        line=16 if len(shown) <= 60 else 7,
        heaviest=max((held.cost.total for each in by_table.values() for held in each), default=1.0),
        more=len(by_table) - len(shown),
    )


def _time_chart(result: PlanResult) -> dict[str, Any]:
    """Seconds of every rank, stacked by term, with the lower bound as a line."""
    estimate = result.estimate
    stacks = [[*row, estimate.fixed_s] for row in estimate.cost_RT.tolist()]
    names = [*(TERM_NAMES[name] for name in Cost._fields), "collectives and routing"]
    lines = {f"lower bound {human_seconds(result.bound_s)}": result.bound_s}
    title = "Time of a step by rank (embedding part, predicted)"
    return _chart(title, stacks, names, (*TERM_COLORS, "#555555"), max(estimate.worst_s, 1e-12), lines, human_seconds)


def _memory_chart(result: PlanResult) -> dict[str, Any]:
    """Device bytes of every rank, stacked by kind, with the ranks' memory as a line."""
    estimate = result.estimate
    stacks = [
        [*held[:-1], reserved]
        for held, reserved in zip(estimate.storage_RT.tolist(), estimate.reserve_R.tolist(), strict=True)
    ]
    names = [STORAGE_NAMES[name] for name in (*ShardBytes._fields[:-1], "reserve")]
    lines = {f"memory {human_bytes(host.memory_bytes)}": float(host.memory_bytes) for host in result.topology.hosts}
    top = max([*lines.values(), *(sum(stack) for stack in stacks)])
    return _chart("Device memory by rank (predicted)", stacks, names, STORAGE_COLORS, top, lines, human_bytes)


def _chart(
    title: str,
    stacks: Sequence[Sequence[float]],
    names: Sequence[str],
    colors: Sequence[str],
    top: float,
    lines: Mapping[str, float],
    show: Callable[[float], str],
) -> dict[str, Any]:
    """Bars of a chart that `top` fills, its lines, and the kinds that are somewhere more than 0."""
    most = [max(column) for column in zip(*stacks, strict=True)]
    kinds = [(name, color) for name, color, value in zip(names, colors, most, strict=True) if value > 0]
    bars = []
    for rank, stack in enumerate(stacks):
        y, tip, boxes = float(TOP + CHART_H), f"rank {rank}: {show(sum(stack))}", []
        for value, color, name in zip(stack, colors, names, strict=True):
            height = value / top * CHART_H
            if height < 0.05:
                continue
            y -= height
            tip += f"\n{name}: {show(value)}"
            boxes.append((y, height, color))
        bars.append((LABEL_W + rank * CHART_W / len(stacks), tip, boxes))
    at = [(text, TOP + CHART_H * (1 - value / top)) for text, value in lines.items()]
    return {"title": title, "kinds": kinds, "bars": bars, "lines": at}


def _boxes(shards: Iterable[ShardCost]) -> list[_Box]:
    boxes: list[_Box] = []
    for held in sorted(shards, key=lambda each: (each.shard.rank, each.shard)):
        last = boxes[-1] if boxes else None
        rank = held.shard.rank
        if last and rank == last.last:
            boxes[-1] = _Box(last.first, last.last, last.held, last.seconds + held.cost.total)
        elif last and rank == last.last + 1 and _equal(last.held, held):
            boxes[-1] = _Box(last.first, rank, last.held, last.seconds)
        else:
            boxes.append(_Box(rank, rank, held, held.cost.total))
    return boxes


def _equal(first: ShardCost, second: ShardCost) -> bool:
    return first.shard.shape == second.shard.shape and abs(first.cost.total - second.cost.total) < 1e-15
