"""Small helpers for scripts that come from TorchRec."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import nn

T = TypeVar("T")


def none_throws(value: T | None, message: str = "unexpected None") -> T:
    """The value.

    Raises:
        AssertionError: it is None.
    """
    if value is None:
        raise AssertionError(message)
    return value


def append_prefix(prefix: str, name: str) -> str:
    """`prefix.name`; the one that is not empty alone."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def filter_state_dict(state_dict: Mapping[str, T], name: str) -> dict[str, T]:
    """The entries under `name.`, without it."""
    return {key.removeprefix(f"{name}."): value for key, value in state_dict.items() if key.startswith(f"{name}.")}


def add_prefix_to_state_dict(state_dict: dict[str, Any], prefix: str) -> None:
    """Puts `prefix` before every key, in place."""
    for key in list(state_dict):
        state_dict[prefix + key] = state_dict.pop(key)


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Paths of the largest submodules without sharded tables, of a model that has been through
    DistributedModelParallel."""
    from rayrec.distributed.sharding.parameters import ShardedTable

    found: list[str] = []

    def walk(module: nn.Module, path: str) -> bool:
        """Whether tables lie below; names the children that have none, where others have."""
        if isinstance(module, ShardedTable):
            return True
        below = {name: walk(child, append_prefix(path, name)) for name, child in module.named_children()}
        if any(below.values()):
            found.extend(append_prefix(path, name) for name, sharded in below.items() if not sharded)
        return any(below.values())

    inner = getattr(model, "module", model)
    if not walk(inner, ""):
        return [""]
    return found


def copy_to_device(module: nn.Module, current_device: torch.device, to_device: torch.device) -> nn.Module:
    """A deep copy whose parameters and buffers of one device lie on another."""
    return copy.deepcopy(module)._apply(lambda t: t.to(to_device) if t.device == current_device else t)


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Allocates what is on meta, and has each such module fill its own by `reset_parameters`."""
    from rayrec.distributed.model_parallel import materialize

    materialize(module, device)
