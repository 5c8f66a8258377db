"""`torchrec.distributed.model_parallel`."""

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from rayrec.distributed.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from rayrec.distributed.dmp_collection import DMPCollection
from rayrec.distributed.model_parallel import DistributedModelParallel

__all__ = [
    "DMPCollection",
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "DistributedModelParallel",
    "get_default_sharders",
    "get_module",
    "get_unwrapped_module",
]


def get_module(module: nn.Module) -> nn.Module:
    """The module inside DistributedModelParallel, with its data-parallel wrapper."""
    while isinstance(module, DistributedModelParallel):
        module = module.data_parallel
    return module


def get_unwrapped_module(module: nn.Module) -> nn.Module:
    """The module inside DistributedModelParallel, DistributedDataParallel and FullyShardedDataParallel."""
    while True:
        inner = get_module(module)
        if isinstance(inner, DistributedDataParallel):
            inner = inner.module
        elif type(inner).__name__ == "FullyShardedDataParallel":
            inner = inner._fsdp_wrapped_module  # type: ignore[assignment]
        if inner is module:
            return module
        module = inner
