"""`torchrec.distributed.types`: rayrec's plan, environment and awaitables under TorchRec's names, and its enums."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, Generic, TypeVar

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor, ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardingSpec, ShardMetadata

from rayrec._runtime.streamable import Multistreamable
from rayrec.distributed.comm.awaitable import Awaitable, LazyAwaitable
from rayrec.distributed.comm.env import ShardingEnv
from rayrec.distributed.plan.sharding_plan import ModuleSharding, ShardingPlan
from rayrec.distributed.plan.shards import (
    DEFAULT_LOAD_FACTOR,
    Shard,
    ShardingType,
    Span,
)
from rayrec.distributed.replicas import env
from rayrec.torchrec.distributed.cache_kinds import (
    BoundsCheckMode,
    CacheAlgorithm,
    CacheStatistics,
    MultiPassPrefetchConfig,
)
from rayrec.torchrec.distributed.model_parallel import ShardingStrategy
from rayrec.torchrec.distributed.module_sharder import ModuleSharder, ShardingPlanner
from rayrec.torchrec.distributed.parameter_sharding import CacheParams, EmbeddingModuleShardingPlan, ParameterSharding
from rayrec.torchrec.distributed.sharded_module import ShardedModule
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "DEFAULT_LOAD_FACTOR",
    "Awaitable",
    "BoundsCheckMode",
    "CacheAlgorithm",
    "CacheParams",
    "CacheStatistics",
    "CommOp",
    "ComputeKernel",
    "DeviceToHostTensorAwaitable",
    "EmbeddingEvent",
    "EmbeddingModuleShardingPlan",
    "EnumerableShardingSpec",
    "GetItemLazyAwaitable",
    "KeyValueParams",
    "LazyAwaitable",
    "LazyGetItemMixin",
    "LazyNoWait",
    "ModuleSharder",
    "ModuleSharding",
    "MultiPassPrefetchConfig",
    "NoWait",
    "NullShardedModuleContext",
    "NullShardingContext",
    "ParameterSharding",
    "ParameterStorage",
    "PipelineType",
    "Shard",
    "ShardMetadata",
    "ShardedModule",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "ShardingEnv",
    "ShardingEnv2D",
    "ShardingPlan",
    "ShardingPlanner",
    "ShardingSpec",
    "ShardingStrategy",
    "ShardingType",
    "Span",
    "StorageUsageType",
    "TensorProperties",
]

K = TypeVar("K")
T = TypeVar("T")


class NoWait(Awaitable[T]):
    """Wraps a result as an awaitable."""

    def __init__(self, obj: T) -> None:
        self._obj = obj

    def _wait_impl(self) -> T:
        return self._obj


@dataclass(frozen=True, init=False)
class ShardingEnv2D(env.ShardingEnv2D):
    """Process groups of 2D parallelism, with TorchRec's arguments.

    Args:
        sharding_pg: the sharding group of this rank.
        replica_pg: the ranks with the same shards, one per sharding group.
        global_pg: all ranks.
        device_mesh: ignored.
        node_group_size: ranks per host in the sharding group; default: derived from hostnames.
    """

    def __init__(
        self,
        sharding_pg: dist.ProcessGroup,
        replica_pg: dist.ProcessGroup,
        global_pg: dist.ProcessGroup,
        device_mesh: object = None,
        node_group_size: int | None = None,
    ) -> None:
        size, rank = sharding_pg.size(), sharding_pg.rank()
        super().__init__(size, rank, sharding_pg, node_group_size, replica_pg=replica_pg, global_pg=global_pg)

    def num_sharding_groups(self) -> int:
        """Number of sharding groups, which is the number of replicas of each table."""
        return self.replica_pg.size()

    @property
    def sharding_pg(self) -> dist.ProcessGroup:
        """The sharding group of this rank."""
        assert self.process_group is not None
        return self.process_group


class PipelineType(Enum):
    """The training pipeline of a model."""

    NONE = "none"
    TRAIN_BASE = "train_base"
    TRAIN_SPARSE_DIST = "train_sparse_dist"
    TRAIN_PREFETCH_SPARSE_DIST = "train_prefetch_sparse_dist"


class ComputeKernel(Enum):
    """The kernel of a module with a single kernel."""

    DEFAULT = "default"


class EmbeddingEvent(Enum):
    """Names of the stages of a step in profiles."""

    KJT_SPLITS_DIST = "splits_dist"
    KJT_TENSORS_DIST = "tensors_dist"
    LOOKUP = "lookup"
    OUTPUT_DIST = "output_dist"
    OUTPUT_DIST_WAIT = "output_dist_wait"


class ParameterStorage(Enum):
    """Device memory or host memory."""

    HBM = "hbm"
    DDR = "ddr"


class CommOp(Enum):
    """Exchanges that can have a codec."""

    POOLED_EMBEDDINGS_ALL_TO_ALL = "pooled_embeddings_all_to_all"
    POOLED_EMBEDDINGS_REDUCE_SCATTER = "pooled_embeddings_reduce_scatter"
    SEQUENCE_EMBEDDINGS_ALL_TO_ALL = "sequence_embeddings_all_to_all"


class StorageUsageType(Enum):
    """The sharder that computes the storage usage."""

    BASE_QUANT = "BaseQuantEmbeddingSharder"
    BASE = "BaseEmbeddingSharder"
    DEFAULT = "ModuleSharder"


@dataclass(frozen=True)
class KeyValueParams:
    """Settings of tables on disk or on parameter servers, which are not supported: a plan with them is refused."""

    ssd_storage_directory: str | None = None
    ssd_rocksdb_write_buffer_size: int | None = None
    ssd_rocksdb_shards: int | None = None
    gather_ssd_cache_stats: bool | None = None
    stats_reporter_config: object | None = None
    use_passed_in_path: bool = True
    l2_cache_size: int | None = None
    max_l1_cache_size: int | None = None
    enable_async_update: bool | None = None
    bulk_init_chunk_size: int | None = None
    lazy_bulk_init_enabled: bool | None = None
    enable_raw_embedding_streaming: bool | None = None
    res_store_shards: int | None = None
    kvzch_tbe_config: object | None = None
    load_ckpt_without_opt: bool = False
    ps_hosts: tuple[tuple[str, int], ...] | None = None
    ps_client_thread_num: int | None = None
    ps_max_key_per_request: int | None = None
    ps_max_local_index_length: int | None = None


class NullShardedModuleContext(Multistreamable):
    """The context of a sharded module without state."""

    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:
        """Does nothing."""

    def __setattr__(self, key: str, value: object) -> None:
        raise NotImplementedError("NullShardedModuleContext has no attributes; derive a context of your own")


class NullShardingContext(Multistreamable):
    """The context of a sharding without state."""

    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:
        """Does nothing."""


class LazyNoWait(LazyAwaitable[T]):
    """Wraps a result as a lazy awaitable."""

    def __init__(self, obj: T) -> None:
        self._obj = obj

    def _wait_impl(self) -> T:
        return self._obj


class DeviceToHostTensorAwaitable(LazyAwaitable[torch.Tensor]):
    """An asynchronous copy of a tensor from a device to the host.

    Args:
        tensor_on_device: the tensor; the constructor starts the copy.
    """

    def __init__(self, tensor_on_device: torch.Tensor) -> None:
        self._tensor = tensor_on_device.to("cpu", non_blocking=True)
        self._copied = torch.cuda.current_stream().record_event() if tensor_on_device.is_cuda else None

    def _wait_impl(self) -> torch.Tensor:
        if self._copied is not None:
            self._copied.synchronize()
        return self._tensor


class LazyGetItemMixin(Generic[K, T]):
    """Makes the items of a `LazyAwaitable` lazy too. Place it before `LazyAwaitable` in the list of bases."""

    def __getitem__(self, key: K) -> LazyAwaitable[T]:
        return GetItemLazyAwaitable(self, key)  # type: ignore[arg-type]


class GetItemLazyAwaitable(LazyAwaitable[T]):
    """An item of the result of another awaitable."""

    def __init__(self, parent: Awaitable[Any], key: Any) -> None:
        self._parent, self._key = parent, key

    def _wait_impl(self) -> T:
        return self._parent.wait()[self._key]
