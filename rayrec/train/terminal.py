"""Text for a terminal: safe output of strings from files and configs, numbers, tables, and a plan as a table."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from rayrec._runtime.ranks import ranks_text
from rayrec.distributed.planner.report.text import human_bytes

MAX_RANK_LINES = 16

# Control characters except tab and newline, and characters that change the text direction. In a name or value they
# could clear or colour the screen, or disguise the text.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """`text` with its control characters escaped, as `\\x1b`."""
    return _CONTROL.sub(lambda match: ascii(match.group())[1:-1], text)


def plain(text: str) -> str:
    """`text` for a rich console: control characters and markup are escaped."""
    return escape(visible(text))


def notice(text: str) -> None:
    """Print a line on stderr, so that it does not mix with piped results."""
    with suppress(Exception):  # stderr may be closed
        print(f"rayrec: {visible(text)}", file=sys.stderr, flush=True)


def format_metric(value: float | None, digits: int = 4) -> str:
    """A number with so many digits after the point; a dash without one."""
    return "–" if value is None else f"{value:.{digits}f}"


def table(*heads: str, title: str | None = None) -> Table:
    """An empty table. Its first column does not wrap.

    Args:
        heads: column titles; a trailing `>` aligns the column to the right.
    """
    result = Table(title=title, title_justify="left")
    for index, head in enumerate(heads):
        justify: Literal["left", "right"] = "right" if head.endswith(">") else "left"
        result.add_column(head.rstrip(">"), justify=justify, no_wrap=index == 0, overflow="fold")
    return result


def plan_table(plan: Mapping[str, Any], limit: int = 60) -> Table:
    """The plan of `ShardingPlan.to_dict` as a table, with a line for each of the first `limit` embedding tables."""
    result = table("table", "rows × dim>", "sharding", "kernel", "shards>", "ranks>", title="sharding plan")
    tables = [(name, sharding) for module in plan["plan"].values() for name, sharding in module.items()]
    for name, sharding in tables[:limit]:
        shards = sharding["shards"]
        rows, dim = (max(s["shard_offsets"][i] + s["shard_sizes"][i] for s in shards) for i in (0, 1))
        kind, kernel = sharding["sharding_type"], sharding["compute_kernel"]
        result.add_row(plain(name), f"{rows:,} × {dim}", kind, kernel, _sizes(shards), ranks_text(sharding["ranks"]))
    if len(tables) > limit:
        result.caption = f"and {len(tables) - limit} more tables"
    return result


def _sizes(shards: Sequence[Mapping[str, Any]]) -> str:
    """`2 of 842 × 32`: the number of shards, and the size of the largest."""
    rows, cols = max((s["shard_sizes"] for s in shards), key=lambda size: size[0] * size[1])
    return f"{len(shards)} of {rows:,} × {cols}"


def memory_lines(plan: Mapping[str, Any]) -> list[str]:
    """Bytes of weights, optimizer state and dense parameters: a line for each rank, or for the largest and the
    smallest of more than `MAX_RANK_LINES`."""
    ranks = list(plan.get("memory", []))
    heads = [f"rank {rank['rank']}" for rank in ranks]
    if len(ranks) > MAX_RANK_LINES:
        by_bytes = sorted(ranks, key=lambda rank: rank["weights_bytes"] + rank["optimizer_bytes"] + rank["dense_bytes"])
        ranks, heads = [by_bytes[-1], by_bytes[0]], ["largest rank", "smallest rank"]
        heads = [f"{head} of {len(by_bytes):,} ({rank['rank']})" for head, rank in zip(heads, ranks, strict=True)]
    return [
        f"{head}: {human_bytes(rank['weights_bytes'])} weights, {human_bytes(rank['optimizer_bytes'])} optimizer, "
        f"{human_bytes(rank['dense_bytes'])} dense"
        + (f", {human_bytes(rank['map_bytes'])} maps of ids" if "map_bytes" in rank else "")
        for head, rank in zip(heads, ranks, strict=True)
    ]


def host_lines(plan: Mapping[str, Any]) -> list[str]:
    """The hosts and speeds that the planner assumed, and how hosts exchange embedding vectors."""
    planned = plan.get("planned_for")
    if planned is None:
        return []
    kinds = Counter(_host_words(host) for host in planned["hosts"])
    hosts = ", ".join(f"{count} × {words}" if count > 1 else words for words, count in kinds.items())
    return [f"planned for {hosts}; speeds: {planned['speeds']}", f"vectors: {planned['exchange']}"]


def _host_words(host: Mapping[str, Any]) -> str:
    unit = "rank" if host["ranks"] == 1 else "ranks"
    gpu = f", {host['gpu']}" if host["gpu"] else ""
    return f"host of {host['ranks']} {unit} ({human_bytes(host['memory_bytes'])}, {host['cpus']:g} CPUs{gpu})"
