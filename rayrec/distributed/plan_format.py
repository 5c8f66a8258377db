"""A plan's shardings as fields of JSON, and as the tables that a plan prints."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rayrec.distributed.table_sharding import CacheParams, ParameterSharding, Shard, ShardingType, Span


def write_sharding(p: ParameterSharding) -> dict[str, Any]:
    """The fields of one table's sharding."""
    share = p.cache_params and p.cache_params.load_factor
    cache = {} if share is None else {"cache_params": {"load_factor": share}}
    return {
        "sharding_type": p.sharding_type,
        "compute_kernel": p.compute_kernel,
        **cache,
        "ranks": sorted(set(p.ranks)),
        "shards": [
            {
                "shard_offsets": [s.rows.start, s.cols.start],
                "shard_sizes": list(s.shape),
                "placement": p.placement(s),
            }
            for s in p.shards
        ],
    }


def read_sharding(path: str, name: str, raw: Mapping[str, Any]) -> ParameterSharding:
    """The sharding of table `name` of module `path`, from the fields that `write_sharding` wrote.

    Raises:
        ValueError: one that is missing or malformed.
    """
    where = f"plan of module {path!r}, table {name!r}"
    try:
        sharding_type = ShardingType(raw["sharding_type"]).value
        shards, devices, local_ranks = [], set(), {}
        for piece in raw["shards"]:
            (row, col), (num_rows, num_cols) = piece["shard_offsets"], piece["shard_sizes"]
            rank, device = piece["placement"].removeprefix("rank:").split("/")
            kind, _, index = device.partition(":")
            devices.add(kind)
            if index and int(index) != int(rank):
                local_ranks[int(rank)] = int(index)
            shards.append(
                Shard(table=name, rows=Span(row, row + num_rows), cols=Span(col, col + num_cols), rank=int(rank))
            )
        (device,) = devices
        return ParameterSharding(
            sharding_type=sharding_type,
            compute_kernel=raw["compute_kernel"],
            shards=tuple(shards),
            device=device,
            cache_params=CacheParams(**raw["cache_params"]) if raw.get("cache_params") else None,
            local_ranks=local_ranks,
        )
    except KeyError as error:
        raise ValueError(f"{where}: field {error} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{where}: {error}") from error


def module_text(path: str, tables: Mapping[str, ParameterSharding]) -> str:
    """A module's tables, and their shards."""
    params = [(name, p.sharding_type, p.compute_kernel, str(p.ranks)) for name, p in tables.items()]
    shards = [
        (name, str([s.rows.start, s.cols.start]), str(list(s.shape)), p.placement(s))
        for name, p in tables.items()
        if not p.replicated  # every rank has all of it
        for s in p.shards
    ]
    return "\n".join(
        [
            f"module: {path}",
            "",
            _text_table(("param", "sharding type", "compute kernel", "ranks"), params),
            "",
            _text_table(("param", "shard offsets", "shard sizes", "placement"), shards),
            "",
        ]
    )


def _text_table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(cell) for cell in column) for column in zip(head, *rows, strict=True)]
    lines = [
        " | ".join(cell.center(w) for cell, w in zip(head, widths, strict=True)),
        " | ".join("-" * w for w in widths),
    ]
    lines += [" | ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)
