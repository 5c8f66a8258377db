"""The facts of a sharding plan: shards, how a table is cut, the plan itself, and the sharding environment.

Nothing here computes or communicates; executors live in `sharding/`, decisions in `planner/`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from rayrec.distributed.awaitable import Awaitable, LazyAwaitable, NoWait

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

__all__ = [
    "Awaitable",
    "CacheParams",
    "EmbeddingModuleShardingPlan",
    "LazyAwaitable",
    "ModuleSharder",
    "ModuleSharding",
    "NoWait",
    "ParameterSharding",
    "Shard",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingType",
    "Span",
]

M = TypeVar("M", bound="nn.Module")

PLAN_VERSION = 1
DEFAULT_LOAD_FACTOR = 0.2  # of a device cache; fbgemm's own


class ShardingType(str, Enum):
    """How a table is cut into shards (see `sharding/cuts.py`)."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"
    GRID_SHARD = "grid_shard"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """A half-open range `[start, stop)` of rows or columns."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def overlap(self, other: Span) -> Span:
        """The part both spans hold; of size 0 where they do not meet."""
        start = max(self.start, other.start)
        return Span(start, max(start, min(self.stop, other.stop)))

    def __str__(self) -> str:
        return f"[{self.start}, {self.stop})"


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Shard:
    """One rectangle of one table, on one rank."""

    table: str
    rows: Span
    cols: Span
    rank: int

    @property
    def shape(self) -> tuple[int, int]:
        return (self.rows.size, self.cols.size)


@dataclass(frozen=True, slots=True)
class CacheParams:
    """How much of a table of kernel `fused_uvm_caching` its device cache holds.

    Args:
        load_factor: share of the rows.

    Raises:
        ValueError: a share that is not above 0 and at most 1.
    """

    load_factor: float

    def __post_init__(self) -> None:
        if not 0 < self.load_factor <= 1:
            raise ValueError(f"cache_params: load_factor={self.load_factor} must be above 0 and at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSharding:
    """How one table is sharded.

    `shards` cover the table exactly once; a data-parallel table lists one full rectangle for every rank. `cache_params`
    are of a table behind a device cache; without them it holds fbgemm's default share. `local_ranks` gives the device's
    index of those of its ranks that are not on the first host, where it is another one than the rank.
    """

    sharding_type: str
    compute_kernel: str
    shards: tuple[Shard, ...]
    device: str = "cpu"
    cache_params: CacheParams | None = None
    local_ranks: Mapping[int, int] = field(default_factory=dict, hash=False)

    @property
    def ranks(self) -> list[int]:
        """Ranks that hold a part of the table, ascending, each once."""
        return sorted({shard.rank for shard in self.shards})

    @property
    def load_factor(self) -> float:
        """Share of the rows that a device cache holds, where there is one."""
        return DEFAULT_LOAD_FACTOR if self.cache_params is None else self.cache_params.load_factor

    @property
    def replicated(self) -> bool:
        return self.sharding_type == ShardingType.DATA_PARALLEL.value

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, embedding dim) of the whole table."""
        return (max(s.rows.stop for s in self.shards), max(s.cols.stop for s in self.shards))

    def placement(self, shard: Shard) -> str:
        """The shard's rank and its device, as that rank's host numbers it: `rank:2/cuda:0`, `rank:2/cpu`."""
        index = self.local_ranks.get(shard.rank, shard.rank)
        return f"rank:{shard.rank}/{'cpu' if self.device == 'cpu' else f'{self.device}:{index}'}"


ModuleSharding = dict[str, ParameterSharding]


class EmbeddingModuleShardingPlan(ModuleSharding):
    """The tables' shardings of one collection by name; prints as two tables."""

    def __str__(self) -> str:
        return _module_text("", self).removeprefix("module: \n")


@dataclass(frozen=True)
class ShardingPlan:
    """Where every table of a model lies: `plan[module path][table name]`.

    Prints as one pair of tables a module; round-trips through `to_json` and `from_json`.
    """

    plan: dict[str, ModuleSharding] = field(default_factory=dict)

    def get_plan_for_module(self, path: str) -> ModuleSharding | None:
        return self.plan.get(path)

    def shards(self) -> Iterator[tuple[str, ParameterSharding, Shard]]:
        """(module path, its table's sharding, shard) for every shard of the plan."""
        for path, tables in self.plan.items():
            for sharding in tables.values():
                for shard in sharding.shards:
                    yield path, sharding, shard

    @property
    def min_world_size(self) -> int:
        """The smallest world that has every rank the plan names."""
        return max((shard.rank for _, _, shard in self.shards()), default=-1) + 1

    def to_dict(self) -> dict[str, Any]:
        return {
            "version": PLAN_VERSION,
            "plan": {
                path: {name: _write_sharding(p) for name, p in tables.items()} for path, tables in self.plan.items()
            },
        }

    def to_json(self, indent: int | None = 2) -> str:
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> ShardingPlan:
        """The plan that `to_dict` wrote.

        Raises:
            ValueError: another version, or a field that is missing or malformed, named by its path.
        """
        if data.get("version") != PLAN_VERSION:
            raise ValueError(f"plan version {data.get('version')!r}: this rayrec reads version {PLAN_VERSION}")
        plan: dict[str, ModuleSharding] = {}
        for path, tables in data["plan"].items():
            plan[path] = {name: _read_sharding(path, name, raw) for name, raw in tables.items()}
        return cls(plan)

    @classmethod
    def from_json(cls, text: str) -> ShardingPlan:
        try:
            data = json.loads(text)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"plan is not JSON: {error}") from error
        return cls.from_dict(data)

    def __str__(self) -> str:
        return "\n".join(_module_text(path, tables) for path, tables in self.plan.items())


def _write_sharding(p: ParameterSharding) -> dict[str, Any]:
    cache = {} if p.cache_params is None else {"cache_params": {"load_factor": p.cache_params.load_factor}}
    return {
        "sharding_type": p.sharding_type,
        "compute_kernel": p.compute_kernel,
        **cache,
        "ranks": p.ranks,
        "shards": [
            {
                "shard_offsets": [s.rows.start, s.cols.start],
                "shard_sizes": list(s.shape),
                "placement": p.placement(s),
            }
            for s in p.shards
        ],
    }


def _read_sharding(path: str, name: str, raw: Mapping[str, Any]) -> ParameterSharding:
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


def _module_text(path: str, tables: ModuleSharding) -> str:
    params = [(name, p.sharding_type, p.compute_kernel, str(p.ranks)) for name, p in tables.items()]
    shards = [
        (name, str([s.rows.start, s.cols.start]), str(list(s.shape)), p.placement(s))
        for name, p in tables.items()
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


@dataclass(frozen=True)
class ShardingEnv:
    """Who takes part: world size, own rank, and the process group that joins them (None: plan only).

    `local_world_size` is the number of ranks of each host, where hosts have equally many and come one after the other;
    None: their names tell, when it matters (see `sharding/place.py`).
    """

    world_size: int
    rank: int
    process_group: dist.ProcessGroup | None = None
    local_world_size: int | None = None

    @classmethod
    def from_process_group(cls, pg: dist.ProcessGroup, local_world_size: int | None = None) -> ShardingEnv:
        """The environment of an initialized `torch.distributed` group."""
        return cls(pg.size(), pg.rank(), pg, local_world_size)

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """An environment without communication, for one process."""
        return cls(world_size, rank, None)


class ModuleSharder(ABC, Generic[M]):
    """Turns one kind of module into its sharded twin."""

    module_type: type[M]

    @abstractmethod
    def shard(
        self, module: M, params: ModuleSharding, env: ShardingEnv, device: torch.device | None = None
    ) -> nn.Module:
        """The sharded twin of `module` under `params`, on `device`."""

    @abstractmethod
    def sharding_types(self, compute_device: str) -> list[str]:
        """Sharding types that the twin can execute on `compute_device` ("cpu" or "cuda")."""

    @abstractmethod
    def compute_kernels(self, sharding_type: str, compute_device: str) -> list[str]:
        """Kernels that the twin can run for `sharding_type` on `compute_device`."""

    @abstractmethod
    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """The module's tables by name."""
