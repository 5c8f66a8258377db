"""What sharding is spoken of in: plans, the sharding environment, sharders; and the shards, of `table_sharding.py`.

Nothing here computes or communicates; executors live in `sharding/`, decisions in `planner/`.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from rayrec.distributed.awaitable import (
    Awaitable,
    DeviceToHostTensorAwaitable,
    GetItemLazyAwaitable,
    LazyAwaitable,
    LazyGetItemMixin,
    LazyNoWait,
    NoWait,
)
from rayrec.distributed.named_kinds import (
    CommOp,
    ComputeKernel,
    EmbeddingEvent,
    KeyValueParams,
    NullShardedModuleContext,
    NullShardingContext,
    ParameterStorage,
    PipelineType,
    StorageUsageType,
)
from rayrec.distributed.plan_format import module_text, read_sharding, write_sharding
from rayrec.distributed.table_sharding import (
    DEFAULT_LOAD_FACTOR,
    CacheParams,
    ParameterSharding,
    Shard,
    ShardingType,
    Span,
)

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch import nn

__all__ = [
    "DEFAULT_LOAD_FACTOR",
    "Awaitable",
    "CacheParams",
    "CommOp",
    "ComputeKernel",
    "DeviceToHostTensorAwaitable",
    "EmbeddingEvent",
    "EmbeddingModuleShardingPlan",
    "GetItemLazyAwaitable",
    "KeyValueParams",
    "LazyAwaitable",
    "LazyGetItemMixin",
    "LazyNoWait",
    "ModuleSharder",
    "ModuleSharding",
    "NoWait",
    "NullShardedModuleContext",
    "NullShardingContext",
    "ParameterSharding",
    "ParameterStorage",
    "PipelineType",
    "Shard",
    "ShardingEnv",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingType",
    "Span",
    "StorageUsageType",
]

M = TypeVar("M", bound="nn.Module")

PLAN_VERSION = 1


ModuleSharding = dict[str, ParameterSharding]


class EmbeddingModuleShardingPlan(ModuleSharding):
    """The tables' shardings of one collection by name; prints as two tables."""

    def __str__(self) -> str:
        return module_text("", self).removeprefix("module: \n")


@dataclass(frozen=True)
class ShardingPlan:
    """Where every table of a model lies: `plan[module path][table name]`.

    Prints as one pair of tables a module; round-trips through `to_json` and `from_json`.
    """

    plan: dict[str, ModuleSharding] = field(default_factory=dict)

    def get_plan_for_module(self, module_path: str) -> ModuleSharding | None:
        """The plan of the collection at a path; None where there is none."""
        return self.plan.get(module_path)

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
                path: {name: write_sharding(p) for name, p in tables.items()} for path, tables in self.plan.items()
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

    @property
    def whole(self) -> ShardingEnv:
        """All ranks: the same, but where this is one of several sharding groups."""
        return self

    @classmethod
    def from_local(cls, world_size: int, rank: int) -> ShardingEnv:
        """An environment without communication, for one process."""
        return cls(world_size, rank, None)


class ModuleSharder(ABC, Generic[M]):
    """Turns one kind of module into its sharded twin.

    Args:
        qcomm_codecs_registry: number formats on the wire, of `fbgemm_qcomm_codec`.
    """

    module_type: type[M]
    qcomm_codecs_registry: dict[str, Any] | None = None

    def __init__(self, qcomm_codecs_registry: Mapping[str, Any] | None = None) -> None:
        self.qcomm_codecs_registry = None if qcomm_codecs_registry is None else dict(qcomm_codecs_registry)

    @abstractmethod
    def shard(
        self, module: M, params: ModuleSharding, env: ShardingEnv, device: torch.device | None = None
    ) -> nn.Module:
        """The sharded twin of `module` under `params`, on `device`."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Sharding types that the twin can execute on `compute_device_type` ("cpu" or "cuda")."""
        return [ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Kernels that the twin can run for `sharding_type` on `compute_device_type`."""
        return [ComputeKernel.DEFAULT.value]

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """The module's tables by name."""
        return dict(module.named_parameters())

    def storage_usage(self, tensor: torch.Tensor, compute_device_type: str, compute_kernel: str) -> dict[str, int]:
        """Bytes of a table by the memory it lies in: "hbm", or "ddr" where device or kernel keep it in the host's.

        Raises:
            ValueError: another device than "cuda" or "cpu".
        """
        if compute_device_type not in ("cuda", "cpu"):
            raise ValueError(f"compute_device_type={compute_device_type!r} must be 'cuda' or 'cpu'")
        host = compute_device_type == "cpu" or compute_kernel.startswith("fused_uvm")
        kind = ParameterStorage.DDR if host else ParameterStorage.HBM
        return {kind.value: tensor.numel() * tensor.element_size()}


class ShardingPlanner(ABC):
    """Finds a plan for a model."""

    @abstractmethod
    def plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        """The plan."""

    @abstractmethod
    def collective_plan(self, module: nn.Module, sharders: list[ModuleSharder[Any]]) -> ShardingPlan:
        """One rank's plan, on every rank."""


_OF_TORCH = (
    "EnumerableShardingSpec",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "ShardingSpec",
    "TensorProperties",
)
_OF_FBGEMM = ("BoundsCheckMode", "CacheAlgorithm", "CacheStatistics", "MultiPassPrefetchConfig")


def __getattr__(name: str) -> Any:
    """What TorchRec's module of this name hands on from torch and fbgemm, imported when it is asked for."""
    if name in _OF_TORCH:
        from torch.distributed._shard import sharded_tensor, sharding_spec

        return getattr(sharding_spec, name, None) or getattr(sharded_tensor, name)
    if name in _OF_FBGEMM:
        from rayrec.distributed.kernel import cache_kinds

        return getattr(cache_kinds, name)
    if name in ("ShardingEnv2D", "ShardingStrategy"):
        from rayrec.distributed.replicas import collection

        return getattr(collection, name)
    if name == "ShardedModule":
        from rayrec.distributed.sharded_module import ShardedModule

        return ShardedModule
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
