"""The interface of sharders, and which modules of a model are sharded by which sharder."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from rayrec.distributed.plan.sharding_plan import ModuleSharding
from rayrec.distributed.plan.shards import ShardingType

if TYPE_CHECKING:
    import torch
    from torch import nn

    from rayrec.distributed.comm.env import ShardingEnv

M = TypeVar("M", bound="nn.Module")


class ModuleSharder(ABC, Generic[M]):
    """Shards one kind of module."""

    module_type: type[M]

    @abstractmethod
    def shard(
        self, module: M, params: ModuleSharding, env: ShardingEnv, device: torch.device | None = None
    ) -> nn.Module:
        """Return the sharded module for `module` with the shardings `params`, on `device`."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Return the sharding types that run on `compute_device_type` ("cpu" or "cuda")."""
        return [ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Return the kernels that run `sharding_type` on `compute_device_type`."""
        return ["default"]

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """Return the module's tables by name."""
        return dict(module.named_parameters())


def sharder_of(module: nn.Module, sharders: Sequence[ModuleSharder[Any]], path: str = "") -> ModuleSharder[Any] | None:
    """The sharder for the module's class, else the one for the class whose `forward` it inherits; None without one.

    Raises:
        ValueError: a subclass of a class that can be sharded overrides `forward`.
    """
    for sharder in sharders:
        if type(module) is sharder.module_type:
            return sharder
    for sharder in sharders:
        if isinstance(module, sharder.module_type):
            if type(module).forward is sharder.module_type.forward:
                return sharder
            name, base = type(module).__name__, sharder.module_type.__name__
            raise ValueError(
                f"module {path!r}: {name} is a subclass of {base} and overrides forward, which the sharded {base} "
                f"would not call; give a sharder with module_type={name}, or make a module that calls a {base}"
            )
    return None


def modules_to_shard(
    model: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> list[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """(path, module, sharder) of every module that is sharded. A module used in several places is listed once, under
    its first path; modules inside a module that is sharded are not listed.

    Raises:
        ValueError: as of `sharder_of`.
    """
    found: list[tuple[str, nn.Module, ModuleSharder[Any]]] = []
    for path, module in model.named_modules():
        if any(not outer or path.startswith(f"{outer}.") for outer, _, _ in found):
            continue
        sharder = sharder_of(module, sharders, path)
        if sharder is not None:
            found.append((path, module, sharder))
    return found
