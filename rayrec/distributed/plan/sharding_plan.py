"""`ShardingPlan`: the shardings of all tables of a model, its JSON, and its text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rayrec.distributed.plan.shards import CacheParams, ParameterSharding, Shard, ShardingType, Span

PLAN_VERSION = 1

ModuleSharding = dict[str, ParameterSharding]


@dataclass(frozen=True)
class ShardingPlan:
    """Shardings of all tables of a model: `plan[module path][table name]`.

    Prints as two text tables per module; round-trips through `to_json` and `from_json`.
    """

    plan: dict[str, ModuleSharding] = field(default_factory=dict)

    def shards(self) -> Iterator[tuple[str, ParameterSharding, Shard]]:
        """(module path, sharding of the table, shard) of every shard."""
        for path, tables in self.plan.items():
            for sharding in tables.values():
                for shard in sharding.shards:
                    yield path, sharding, shard

    @property
    def min_world_size(self) -> int:
        """The smallest world size that has all ranks of the plan."""
        return max((shard.rank for _, _, shard in self.shards()), default=-1) + 1

    def get_plan_for_module(self, module_path: str) -> ModuleSharding | None:
        """The plan of the collection at a path; None if there is none."""
        return self.plan.get(module_path)

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": PLAN_VERSION,
            "plan": {
                path: {name: write_sharding(p) for name, p in tables.items()} for path, tables in self.plan.items()
            },
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShardingPlan:
        """The plan written by `to_dict`.

        Raises:
            ValueError: another version, or a missing or malformed field.
        """
        if data.get("version") != PLAN_VERSION:
            raise ValueError(f"plan version {data.get('version')!r}: this rayrec reads version {PLAN_VERSION}")
        plan: dict[str, ModuleSharding] = {}
        for path, tables in data["plan"].items():
            plan[path] = {name: read_sharding(path, name, raw) for name, raw in tables.items()}
        return cls(plan)

    @classmethod
    def from_json(cls, text: str) -> ShardingPlan:
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"plan is not JSON: {error}") from error
        return cls.from_dict(data)

    def __str__(self) -> str:
        return "\n".join(module_text(path, tables) for path, tables in self.plan.items())


def write_sharding(p: ParameterSharding) -> dict[str, Any]:
    """One table's sharding as JSON data."""
    share = p.cache_params and p.cache_params.load_factor
    cache = {} if share is None else {"cache_params": {"load_factor": share}}
    return {
        "sharding_type": p.sharding_type,
        "compute_kernel": p.compute_kernel,
        **cache,
        **({} if p.stochastic_rounding is None else {"stochastic_rounding": p.stochastic_rounding}),
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
    """The sharding of table `name` of module `path`, from the result of `write_sharding`.

    Raises:
        ValueError: a missing or malformed field.
    """
    subject = f"plan of module {path!r}, table {name!r}"
    try:
        sharding_type = ShardingType(raw["sharding_type"]).value
        shards, devices, local_ranks = [], set(), {}
        for shard in raw["shards"]:
            (row, col), (num_rows, num_cols) = shard["shard_offsets"], shard["shard_sizes"]
            rank, device = shard["placement"].removeprefix("rank:").split("/")
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
            stochastic_rounding=raw.get("stochastic_rounding"),
        )
    except KeyError as error:
        raise ValueError(f"{subject}: field {error} is missing") from error
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{subject}: {error}") from error


def module_text(path: str, tables: Mapping[str, ParameterSharding]) -> str:
    """The text of a module's tables and shards."""
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
