"""Helpers of TorchRec's `distributed.utils`."""

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
    from rayrec.distributed.collections.sharded_table import ShardedTable

    found: list[str] = []

    def walk(module: nn.Module, path: str) -> bool:
        """Whether tables lie below; names the children that have none, where others have."""
        if isinstance(module, ShardedTable):
            return True
        below = {name: walk(child, append_prefix(path, name)) for name, child in module.named_children()}
        if any(below.values()):
            found.extend(append_prefix(path, name) for name, sharded in below.items() if not sharded)
        return any(below.values())

    if not walk(model, ""):
        return [""]
    return found


def get_device_type() -> str:
    """ "cuda" where there is a GPU, else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def merge_fused_params(
    fused_params: Mapping[str, Any] | None = None, param_fused_params: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """A sharder's settings with a table's own over them; `lr` is called `learning_rate`."""
    own = dict(param_fused_params or {})
    if "lr" in own:
        own["learning_rate"] = own.pop("lr")
    return {**(fused_params or {}), **own}


def optimizer_type_to_emb_opt_type(optimizer_class: type[torch.optim.Optimizer]) -> Any:
    """fbgemm's name of the fused update that an optimizer stands for.

    Raises:
        ValueError: it stands for none.
    """
    from rayrec.distributed.kernel.optimizer_spec import twin

    return twin(optimizer_class)[0].kind


@contextmanager
def sharded_model_copy(device: str | int | torch.device | None) -> Iterator[None]:
    """Inside, `copy.deepcopy` of a module puts parameters and tensors on a device; of None, it keeps the originals'
    memory. Process groups are not copied. Sharded tables refuse: their kernels' memory is not theirs alone."""
    from rayrec.distributed.collections.sharded_table import ShardedTable

    def tensor(value: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
        return value if device is None else value.detach().to(device, copy=True)

    def parameter(value: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
        return nn.Parameter(tensor(value, memo), requires_grad=value.requires_grad)

    def refuse(table: nn.Module, memo: dict[int, Any]) -> nn.Module:
        raise ValueError(
            "sharded tables are not copied; shard the model again with the same plan, and load this one's state_dict"
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
    """A module with `copy`."""

    def copy(self, device: torch.device) -> nn.Module:
        """A deep copy on a device, of a module on the CPU."""
        return copy_to_device(self, torch.device("cpu"), device)


def copy_to_device(module: nn.Module, current_device: torch.device, to_device: torch.device) -> nn.Module:
    """A deep copy with the parameters and buffers of one device moved to another."""
    return copy.deepcopy(module)._apply(lambda t: t.to(to_device) if t.device == current_device else t)


def init_parameters(module: nn.Module, device: torch.device) -> None:
    """Allocates what is on meta, and has each such module fill its own by `reset_parameters`."""
    from rayrec.distributed.model_parallel import materialize

    materialize(module, device)
