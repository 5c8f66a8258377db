"""The interface of sharders, and the search for the modules of a model that they shard."""

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
        """The sharded module of `module` with the shardings `params`, on `device`."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The sharding types supported on `compute_device_type` ("cpu" or "cuda")."""
        return [ShardingType.DATA_PARALLEL.value]

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """The kernels that support `sharding_type` on `compute_device_type`."""
        return ["default"]

    def shardable_parameters(self, module: M) -> dict[str, nn.Parameter]:
        """The module's tables by name."""
        return dict(module.named_parameters())


def sharder_of(module: nn.Module, sharders: Sequence[ModuleSharder[Any]], path: str = "") -> ModuleSharder[Any] | None:
    """The sharder for the module's class, else for the class whose `forward` it inherits; None without one.

    Raises:
        ValueError: a subclass of a shardable class overrides `forward`.
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
                f"would not call; add a sharder with module_type={name}, or call a {base} from another module"
            )
    return None


def modules_to_shard(
    model: nn.Module, sharders: Sequence[ModuleSharder[Any]]
) -> list[tuple[str, nn.Module, ModuleSharder[Any]]]:
    """(path, module, sharder) of every module to shard. A module that occurs several times is listed once, under its
    first path; modules inside a listed module are not listed.

    Raises:
        ValueError: see `sharder_of`; a table that shares its weight with another table or layer.
    """
    matches: list[tuple[str, nn.Module, ModuleSharder[Any]]] = []
    for path, module in model.named_modules():
        if any(not outer or path.startswith(f"{outer}.") for outer, _, _ in matches):
            continue
        sharder = sharder_of(module, sharders, path)
        if sharder is not None:
            matches.append((path, module, sharder))
    _refuse_tied_tables(model, matches)
    return matches


def _refuse_tied_tables(model: nn.Module, matches: Sequence[tuple[str, nn.Module, ModuleSharder[Any]]]) -> None:
    """Raises ValueError for a table whose weight is also another table's or layer's: sharding would untie them."""
    names: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), []).append(f"{path}.{name}" if path else name)
    for path, module, sharder in matches:
        inside = f"{path}." if path else ""
        tables = [id(weight) for weight in sharder.shardable_parameters(module).values()]
        for table in tables:
            tied = names.get(table, [])
            # A sharder may handle ties inside its module, unless they are between two of its tables.
            if tables.count(table) > 1 or not all(name.startswith(inside) for name in tied):
                raise ValueError(
                    f"{' and '.join(map(repr, tied))} are one parameter, which sharding would turn into separate "
                    "weights: give both features to one table (`rayrec.modules.Lookup` serves bags and sequences), "
                    "or give the layer a weight of its own"
                )
