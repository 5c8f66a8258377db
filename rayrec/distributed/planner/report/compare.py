"""The difference of two plans: changed tables, and the share of weights that move."""

from __future__ import annotations

from collections.abc import Sequence

from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import ParameterSharding
from rayrec.distributed.planner.report.text import columns

SHOWN_RANKS = 8


def diff(old: ShardingPlan, new: ShardingPlan) -> str:
    """The tables that differ, `-` old and `+` new, and the share of weights that change their rank."""
    old_tables = {(path, name): p for path, tables in old.plan.items() for name, p in tables.items()}
    new_tables = {(path, name): p for path, tables in new.plan.items() for name, p in tables.items()}
    rows: list[tuple[str, ...]] = []
    moved = total = 0
    for key in list(dict.fromkeys([*old_tables, *new_tables])):
        old_sharding, new_sharding = old_tables.get(key), new_tables.get(key)
        if new_sharding is not None:
            total += _numbers(new_sharding)
            moved += _arriving(old_sharding, new_sharding)
        if old_sharding == new_sharding:
            continue
        label = ".".join(part for part in key if part)
        rows += [_row(sign, label, p) for sign, p in (("-", old_sharding), ("+", new_sharding)) if p is not None]
    if not rows:
        return f"no difference: both plans shard {len(new_tables)} tables in the same way"
    changed = len({row[1] for row in rows})
    text = columns(("", "table", "sharding type", "compute kernel", "shards", "ranks"), rows, frozenset({4}))
    share = moved / total if total else 0.0
    return f"{text}\n\n{changed} of {len(new_tables)} tables differ; {share:.1%} of all weights change their rank"


def _row(sign: str, label: str, p: ParameterSharding) -> tuple[str, ...]:
    cached = "" if p.cache_params is None else f" {p.load_factor:.0%}"
    return (sign, label, p.sharding_type, p.compute_kernel + cached, str(len(p.shards)), _ranks(sorted(set(p.ranks))))


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) <= SHOWN_RANKS:
        return str(list(ranks))
    return f"[{ranks[0]} .. {ranks[-1]}] ({len(ranks)})"


def _numbers(p: ParameterSharding) -> int:
    return sum(shard.rows.size * shard.cols.size for shard in p.shards)


def _arriving(old: ParameterSharding | None, new: ParameterSharding) -> int:
    """The number of weights that `new` puts on a rank which did not hold them under `old`."""
    old_rectangles: dict[int, list[tuple[int, int, int, int]]] = {}
    for shard in old.shards if old is not None else ():
        old_rectangles.setdefault(shard.rank, []).append(
            (shard.rows.start, shard.rows.stop, shard.cols.start, shard.cols.stop)
        )
    missing = 0
    for shard in new.shards:
        unmoved = 0
        for r0, r1, c0, c1 in old_rectangles.get(shard.rank, ()):
            rows = max(0, min(r1, shard.rows.stop) - max(r0, shard.rows.start))
            cols = max(0, min(c1, shard.cols.stop) - max(c0, shard.cols.start))
            unmoved += rows * cols
        missing += shard.rows.size * shard.cols.size - unmoved
    return missing
