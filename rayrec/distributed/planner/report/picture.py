"""Drawings of ranks as HTML: bars of time or memory, and tables by rank. Independent of the planner."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from rayrec.distributed.plan.shards import Shard, ShardingType
from rayrec.distributed.planner.report.text import human_bytes, human_seconds

MOST_TABLES = 400  # maximum drawn; the cheapest tables beyond it are only counted
LABEL_W, CHART_W, CHART_H, TOP = 190, 900, 150, 12
TERM_COLORS = ("#3b6fb6", "#8fc1e3", "#4f9dca", "#f2b872", "#e08a2e", "#6a9f58", "#d98cb3", "#b5508a", "#9a9a9a")
STORAGE = {  # name and color
    "weights": ("weights", "#3b6fb6"),
    "optimizer": ("optimizer state", "#e08a2e"),
    "gradients": ("dense gradients", "#b5508a"),
    "ids": ("id buffers", "#8fc1e3"),
    "vectors": ("vector buffers", "#f2b872"),
    "cache": ("UVM cache", "#6a9f58"),
    "reserve": ("reserved", "#c4c4c4"),
}
KIND_COLORS = {
    ShardingType.TABLE_WISE.value: "#3b6fb6",
    ShardingType.COLUMN_WISE.value: "#e08a2e",
    ShardingType.TABLE_COLUMN_WISE.value: "#f2b872",
    ShardingType.ROW_WISE.value: "#6a9f58",
    ShardingType.TABLE_ROW_WISE.value: "#a7cf97",
    ShardingType.GRID_SHARD.value: "#b5508a",
    ShardingType.DATA_PARALLEL.value: "#9a9a9a",
}


class Drawn(NamedTuple):
    """A shard in the picture: its bytes, and its seconds per step if known."""

    label: str
    sharding_type: str
    kernel: str
    shard: Shard
    device_bytes: float
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class _Box:
    """Equal shards of one table on ranks `first` to `last`."""

    first: int
    last: int
    drawn: Drawn
    seconds: float

    @property
    def color(self) -> str:
        return KIND_COLORS[self.drawn.sharding_type]

    @property
    def tip(self) -> str:
        shard, ranks = self.drawn.shard, f"{self.first}" if self.first == self.last else f"{self.first} to {self.last}"
        cost = f"{human_seconds(self.seconds)} a step, " if self.seconds else ""
        return (
            f"{self.drawn.label} on rank {ranks}\n{self.drawn.sharding_type}, {self.drawn.kernel}\n"
            f"rows {shard.rows.size:,} x columns {shard.cols.size}\n{cost}{human_bytes(self.drawn.device_bytes)}"
        )

    def width(self, step: float) -> float:
        return max(1.0, (self.last - self.first + 1) * step - (1.5 if step > 6 else 0))


def rank_chart(
    stacks: Sequence[Sequence[float]],
    kinds: Sequence[tuple[str, str]],
    show: Callable[[float], str],
    lines: Mapping[str, float] | None = None,
    note: str = "",
) -> Markup:
    """A bar for each rank, stacked by kind, as HTML.

    Args:
        stacks: for each rank, the value of each kind.
        kinds: name and color of each kind; a kind without values above 0 is not drawn.
        show: formats a value.
        lines: name and value of each line across the bars.
        note: text below the chart.
    """
    lines = lines or {}
    top = max([*lines.values(), *map(sum, stacks), 1e-12])
    bars = []
    for rank, stack in enumerate(stacks):
        y, tip, boxes = float(TOP + CHART_H), f"rank {rank}: {show(sum(stack))}", []
        for value, (name, color) in zip(stack, kinds, strict=True):
            height = value / top * CHART_H
            if height < 0.05:
                continue
            y -= height
            tip += f"\n{name}: {show(value)}"
            boxes.append((y, height, color))
        bars.append((rank, tip, boxes))
    used = [kind for kind, column in zip(kinds, zip(*stacks, strict=True), strict=True) if max(column) > 0]
    line_positions = [(text, TOP + CHART_H * (1 - value / top)) for text, value in lines.items()]
    return _by_rank(
        "chart", len(stacks), kinds=used, height=TOP + CHART_H + 20, bars=bars, lines=line_positions, note=note
    )


def tables_by_rank(drawn: Iterable[Drawn], edges: Sequence[int]) -> Markup:
    """The tables of each rank as HTML, most expensive tables first.

    Args:
        edges: the first rank of each host, and the number of ranks.
    """
    by_table: dict[str, list[Drawn]] = {}
    for shard in drawn:
        by_table.setdefault(shard.label, []).append(shard)

    def cost(label: str) -> tuple[float, float]:
        return sum(shard.seconds for shard in by_table[label]), sum(shard.device_bytes for shard in by_table[label])

    labels = sorted(sorted(by_table), key=cost, reverse=True)[:MOST_TABLES]
    omitted, line = len(by_table) - len(labels), 16 if len(labels) <= 60 else 7
    kinds = dict.fromkeys(shards[0].sharding_type for shards in by_table.values())
    return _by_rank(
        "picture",
        edges[-1],
        edges=edges,
        kinds=[(kind.replace("_", "-"), KIND_COLORS[kind]) for kind in kinds],
        tables=[(label, _boxes(by_table[label])) for label in labels],
        line=line,
        height=24 + len(labels) * line,
        heaviest=max((shard.seconds for shards in by_table.values() for shard in shards), default=0.0),
        note=f"and {omitted:,} less expensive tables" if omitted > 0 else "",
    )


def _boxes(shards: Iterable[Drawn]) -> list[_Box]:
    boxes: list[_Box] = []
    for shard in sorted(shards, key=lambda each: (each.shard.rank, each.shard)):
        last = boxes[-1] if boxes else None
        rank = shard.shard.rank
        if last and rank == last.last:
            boxes[-1] = _Box(last.first, last.last, last.drawn, last.seconds + shard.seconds)
        elif last and rank == last.last + 1 and _equal(last.drawn, shard):
            boxes[-1] = _Box(last.first, rank, last.drawn, last.seconds)
        else:
            boxes.append(_Box(rank, rank, shard, shard.seconds))
    return boxes


def _equal(first: Drawn, second: Drawn) -> bool:
    return first.shard.shape == second.shard.shape and abs(first.seconds - second.seconds) < 1e-15


def _by_rank(name: str, ranks: int, **values: Any) -> Markup:
    """Renders a template with the ranks from left to right."""
    step = CHART_W / ranks
    page = template(name).render(
        left=LABEL_W,
        width=CHART_W,
        ranks=ranks,
        step=step,
        bar_width=max(1.0, step * 0.86 if ranks <= 64 else step),
        every=max(1, -(-ranks // 32)),
        **values,
    )
    return Markup(page)


@cache
def template(name: str) -> Template:
    """A template of this folder."""
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    return environment.get_template(f"{name}.html")
