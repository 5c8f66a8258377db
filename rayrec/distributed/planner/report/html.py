"""Draws a plan as one self-contained HTML file: time and memory of every rank, and tables by rank."""

from __future__ import annotations

from pathlib import Path

from markupsafe import Markup

from rayrec.distributed.planner.cost.terms import Cost, ShardBytes
from rayrec.distributed.planner.report.explain import TERM_NAMES, binding, headline
from rayrec.distributed.planner.report.picture import STORAGE, TERM_COLORS, Drawn, rank_chart, tables_by_rank, template
from rayrec.distributed.planner.report.result import PlanResult
from rayrec.distributed.planner.report.shard_costs import shard_costs
from rayrec.distributed.planner.report.text import human_bytes, human_seconds


def write_html(result: PlanResult, path: str | Path, title: str = "sharding plan", explanation: str = "") -> Path:
    """Draws `result` into the file `path`.

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
    """The page, `plan.html` filled in; it loads no other resources."""
    drawn = (
        Drawn(shard.label, shard.sharding_type, shard.kernel, shard.shard, shard.storage.device, shard.cost.total)
        for shard in shard_costs(result)
    )
    edges = [*(host.first_rank for host in result.topology.hosts), result.topology.world_size]
    charts = {
        "Time of a step by rank (embedding part, predicted)": _time_chart(result),
        "Device memory by rank (predicted)": _memory_chart(result),
    }
    text, picture = explanation or f"{headline(result)}\n\n{binding(result)}", tables_by_rank(drawn, edges)
    return template("plan").render(title=title, text=text, charts=charts.items(), picture=picture)


def _time_chart(result: PlanResult) -> Markup:
    """Seconds of every rank, stacked by term, with the lower bound as a line."""
    estimate = result.estimate
    stacks = [[*row, estimate.fixed_s] for row in estimate.cost_RT.tolist()]
    names = [*(TERM_NAMES[name] for name in Cost._fields), "collectives and routing"]
    lines = {f"lower bound {human_seconds(result.bound_s)}": result.bound_s}
    return rank_chart(stacks, list(zip(names, (*TERM_COLORS, "#555555"), strict=True)), human_seconds, lines)


def _memory_chart(result: PlanResult) -> Markup:
    """Device bytes of every rank, stacked by kind, with the ranks' memory as a line."""
    estimate = result.estimate
    stacks = [
        [*row[:-1], reserved]
        for row, reserved in zip(estimate.storage_RT.tolist(), estimate.reserve_R.tolist(), strict=True)
    ]
    kinds = [STORAGE[name] for name in (*ShardBytes._fields[:-1], "reserve")]
    lines = {f"memory {human_bytes(host.memory_bytes)}": float(host.memory_bytes) for host in result.topology.hosts}
    return rank_chart(stacks, kinds, human_bytes, lines)
