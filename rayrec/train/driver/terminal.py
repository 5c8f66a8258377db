"""On a terminal: text from files and configs, shown, never obeyed; tables, and a sharding plan as one."""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from rich.markup import escape
from rich.table import Table

from rayrec.distributed.planner.report.text import human_bytes

# Control characters but tab and newline, and those that turn the direction of writing: a name or a value with them
# could clear the screen, colour it, or show another text than it is.
_UNSEEN = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """`text` with its control characters written out, as `\\x1b`."""
    return _UNSEEN.sub(lambda found: ascii(found.group())[1:-1], text)


def plain(text: str) -> str:
    """`text` for a rich console: no control characters, no markup read from it."""
    return escape(visible(text))


def notice(text: str) -> None:
    """A line on stderr, where a pipe or a file of results does not have it."""
    with suppress(Exception):  # stderr may be closed
        print(f"rayrec: {visible(text)}", file=sys.stderr, flush=True)


def table(*heads: str, title: str | None = None) -> Table:
    """A table of which the first column stays on one line.

    Args:
        heads: of the columns; one that ends in `>` is aligned to the right.
    """
    made = Table(title=title, title_justify="left")
    for place, head in enumerate(heads):
        right = head.endswith(">")
        made.add_column(head.rstrip(">"), justify="right" if right else "left", no_wrap=not place, overflow="fold")
    return made


def plan_table(plan: Mapping[str, Any], most: int = 60) -> Table:
    """A plan (as `ShardingPlan.to_dict` writes it) with one line a table; the first `most` of them."""
    shown = table("table", "rows × dim>", "sharding", "kernel", "shards>", "ranks>", title="sharding plan")
    tables = [(name, sharding) for module in plan["plan"].values() for name, sharding in module.items()]
    for name, sharding in tables[:most]:
        shards = sharding["shards"]
        rows, dim = (max(s["shard_offsets"][i] + s["shard_sizes"][i] for s in shards) for i in (0, 1))
        kind, kernel = sharding["sharding_type"], sharding["compute_kernel"]
        shown.add_row(plain(name), f"{rows:,} × {dim}", kind, kernel, _sizes(shards), ranks_text(sharding["ranks"]))
    if len(tables) > most:
        shown.caption = f"and {len(tables) - most} more tables"
    return shown


def _sizes(shards: Sequence[Mapping[str, Any]]) -> str:
    """`2 of 842 × 32`: how many shards, and the size of the largest."""
    rows, cols = max((s["shard_sizes"] for s in shards), key=lambda size: size[0] * size[1])
    return f"{len(shards)} of {rows:,} × {cols}"


def ranks_text(ranks: Sequence[int]) -> str:
    """`0–3, 6`."""
    parts: list[list[int]] = []
    for rank in ranks:
        if parts and parts[-1][-1] == rank - 1:
            parts[-1] = [parts[-1][0], rank]
        else:
            parts.append([rank, rank])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in parts)


def memory_lines(plan: Mapping[str, Any]) -> list[str]:
    """One line a rank: bytes of weights, optimizer state and dense parameters."""
    return [
        f"rank {rank['rank']}: {human_bytes(rank['weights_bytes'])} weights, "
        f"{human_bytes(rank['optimizer_bytes'])} optimizer, {human_bytes(rank['dense_bytes'])} dense"
        for rank in plan.get("memory", [])
    ]


def host_lines(plan: Mapping[str, Any]) -> list[str]:
    """The hosts that were planned for, the speeds, and how vectors cross hosts."""
    planned = plan.get("planned_for")
    if planned is None:
        return []
    kinds = Counter(_host_words(host) for host in planned["hosts"])
    hosts = ", ".join(f"{count} × {words}" if count > 1 else words for words, count in kinds.items())
    return [f"planned for {hosts}; speeds: {planned['speeds']}", f"vectors: {planned['exchange']}"]


def _host_words(host: Mapping[str, Any]) -> str:
    each = "rank" if host["ranks"] == 1 else "ranks"
    gpu = f", {host['gpu']}" if host["gpu"] else ""
    return f"host of {host['ranks']} {each} ({human_bytes(host['memory_bytes'])}, {host['cpus']:g} CPUs{gpu})"
