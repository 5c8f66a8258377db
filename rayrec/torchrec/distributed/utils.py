"""Helpers of `torchrec.distributed.utils`."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

T = TypeVar("T")


def none_throws(value: T | None, message: str = "unexpected None") -> T:
    """Returns `value`.

    Raises:
        AssertionError: `value` is None.
    """
    if value is None:
        raise AssertionError(message)
    return value


def append_prefix(prefix: str, name: str) -> str:
    """Returns `prefix.name`, without the dot if either is empty."""
    return f"{prefix}.{name}" if prefix and name else prefix or name


def filter_state_dict(state_dict: Mapping[str, T], name: str) -> dict[str, T]:
    """Returns the entries with keys that start with `name.`, without this prefix."""
    return {key.removeprefix(f"{name}."): value for key, value in state_dict.items() if key.startswith(f"{name}.")}


def add_prefix_to_state_dict(state_dict: dict[str, Any], prefix: str) -> None:
    """Adds a prefix to every key, in place."""
    for key in list(state_dict):
        state_dict[prefix + key] = state_dict.pop(key)


def get_unsharded_module_names(model: nn.Module) -> list[str]:
    """Returns the paths of the largest submodules without sharded tables, after DistributedModelParallel."""
    from rayrec.distributed.collections.sharded_table import ShardedTable

    unsharded: list[str] = []

    def walk(module: nn.Module, path: str) -> bool:
        """Whether the module contains sharded tables. If so, appends its children without tables to `unsharded`."""
        if isinstance(module, ShardedTable):
            return True
        is_sharded = {name: walk(child, append_prefix(path, name)) for name, child in module.named_children()}
        if any(is_sharded.values()):
            unsharded.extend(append_prefix(path, name) for name, sharded in is_sharded.items() if not sharded)
        return any(is_sharded.values())

    if not walk(model, ""):
        return [""]
    return unsharded


def get_device_type() -> str:
    """Returns "cuda" if a GPU is available, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def merge_fused_params(
    fused_params: Mapping[str, Any] | None = None, param_fused_params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Merges the settings of a sharder and a table; the table's have precedence. `lr` becomes `learning_rate`."""
    table_params = dict(param_fused_params or {})
    if "lr" in table_params:
        table_params["learning_rate"] = table_params.pop("lr")
    return {**(fused_params or {}), **table_params}


def optimizer_type_to_emb_opt_type(optimizer_class: type[torch.optim.Optimizer]) -> Any:
    """Returns fbgemm's name of the fused version of an optimizer.

    Raises:
        ValueError: the optimizer has no fused version.
    """
    from rayrec.distributed.kernel.optimizer_spec import twin

    return twin(optimizer_class)[0].kind


@contextmanager
def sharded_model_copy(device: str | int | torch.device | None) -> Iterator[None]:
    """Context in which `copy.deepcopy` of a module copies its parameters and tensors to a device.

    With None, the copy shares the memory of the original. Process groups are not copied. Copying a sharded table raises
    ValueError, because kernels share the memory of tables.

    Args:
        device: the device of the copies, or None.
    """
    from rayrec.distributed.collections.sharded_table import ShardedTable

    def tensor(value: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        return value if device is None else value.detach().to(device, copy=True)

    def parameter(value: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(tensor(value, memo), requires_grad=value.requires_grad)

    def refuse(table: nn.Module, memo: dict[int, Any]) -> nn.Module:
        raise ValueError(
            "sharded tables cannot be copied; shard the model again with the same plan, and load this state_dict"
        )

    copied: dict[Any, Any] = {torch.Tensor: tensor, nn.Parameter: parameter, ShardedTable: refuse}
    copied[dist.ProcessGroup] = lambda group, memo: group
    saved = {kind: kind.__dict__.get("__deepcopy__") for kind in copied}
    for kind, method in copied.items():
        kind.__deepcopy__ = method
    try:
        yield
    finally:
        for kind, method in saved.items():
            if method is None:
                del kind.__deepcopy__
            else:
                kind.__deepcopy__ = method


class CopyableMixin(nn.Module):
    """Adds `copy` to a module."""

    def copy(self, device: torch.device) -> nn.Module:
        """Returns a deep copy on `device` of a module on the CPU."""
        return copy_to_device(self, torch.device("cpu"), device)


def copy_to_device(module: nn.Module, current_device: torch.device, to_device: torch.device) -> nn.Module:
    """Returns a deep copy with the parameters and buffers of one device moved to another."""
    return copy.deepcopy(module)._apply(lambda t: t.to(to_device) if t.device == current_device else t)


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Materializes parameters on meta, and calls `reset_parameters` of their modules."""
    from rayrec.distributed.model_parallel import materialize

    materialize(module, device)
