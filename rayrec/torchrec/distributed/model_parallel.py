"""`torchrec.distributed.model_parallel`."""

from rayrec.distributed.data_parallel import DataParallelWrapper, DefaultDataParallelWrapper
from rayrec.distributed.dmp_collection import DMPCollection
from rayrec.distributed.model_parallel import (
    DistributedModelParallel,
    get_default_sharders,
    get_module,
    get_unwrapped_module,
)

__all__ = [
    "DMPCollection",
    "DataParallelWrapper",
    "DefaultDataParallelWrapper",
    "DistributedModelParallel",
    "get_default_sharders",
    "get_module",
    "get_unwrapped_module",
]
