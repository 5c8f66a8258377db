"""Names of kernels and optimizers, and descriptions of sharded tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from rayrec._runtime.streamable import Multistreamable
from rayrec.distributed.plan.shards import EmbeddingComputeKernel
from rayrec.torchrec.distributed.module_sharder import BaseEmbeddingSharder
from rayrec.torchrec.distributed.sharded_module import ShardedEmbeddingModule
from rayrec.torchrec.modules.embedding_configs import EmbeddingTableConfig
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

if TYPE_CHECKING:
    import torch

    from rayrec.sparse import KeyedJaggedTensor
    from rayrec.torchrec.modules.embedding_configs import DataType, PoolingType


__all__ = [
    "BaseEmbeddingSharder",
    "EmbeddingComputeKernel",
    "GroupedEmbeddingConfig",
    "KJTList",
    "OptimType",
    "ShardedEmbeddingModule",
    "ShardedEmbeddingTable",
]


class OptimType(Enum):
    """Names of optimizers for tables. See `fused_params` for the supported ones."""

    SGD = "SGD"
    LARS_SGD = "LARS_SGD"
    LAMB = "LAMB"
    PARTIAL_ROWWISE_LAMB = "PARTIAL_ROWWISE_LAMB"
    ADAM = "ADAM"
    PARTIAL_ROWWISE_ADAM = "PARTIAL_ROWWISE_ADAM"
    ADAGRAD = "ADAGRAD"
    ROWWISE_ADAGRAD = "ROWWISE_ADAGRAD"
    SHAMPOO = "SHAMPOO"
    SHAMPOO_V2 = "SHAMPOO_V2"
    LION = "LION"
    ADAMW = "ADAMW"
    SHAMPOO_V2_MRS = "SHAMPOO_V2_MRS"
    SHAMPOO_MRS = "SHAMPOO_MRS"
    MUON = "MUON"
    SHAMPOO_V3_MRS = "SHAMPOO_V3_MRS"


class KJTList(Multistreamable):
    """A list of KeyedJaggedTensors."""

    def __init__(self, features: Sequence[KeyedJaggedTensor]) -> None:
        self.features = list(features)

    def __len__(self) -> int:
        return len(self.features)

    def __setitem__(self, key: int, item: KeyedJaggedTensor) -> None:
        self.features[key] = item

    def __getitem__(self, key: int) -> KeyedJaggedTensor:
        return self.features[key]

    def __iter__(self) -> Iterator[KeyedJaggedTensor]:
        return iter(self.features)

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        for feature in self.features:
            feature.record_stream(stream)


@dataclass
class ShardedEmbeddingTable(EmbeddingTableConfig):
    """A table and its shard on this rank. Only for code of your own; rayrec uses `types.Shard`."""

    compute_kernel: EmbeddingComputeKernel = EmbeddingComputeKernel.DENSE
    local_rows: int = 0
    local_cols: int = 0
    local_metadata: Any = None
    global_metadata: Any = None
    dtensor_metadata: Any = None
    fused_params: dict[str, Any] | None = None


@dataclass(frozen=True)
class GroupedEmbeddingConfig:
    """Tables that one kernel could hold. Only for code of your own."""

    data_type: DataType
    pooling: PoolingType
    is_weighted: bool
    has_feature_processor: bool
    compute_kernel: EmbeddingComputeKernel
    embedding_tables: list[ShardedEmbeddingTable]
    fused_params: dict[str, Any] | None = None
    enable_embedding_update: bool = False

    def feature_hash_sizes(self) -> list[int]:
        """Number of rows, for each feature of each table."""
        return [table.num_embeddings for table in self.embedding_tables for _ in table.feature_names]

    def num_features(self) -> int:
        return sum(table.num_features() for table in self.embedding_tables)

    def dim_sum(self) -> int:
        """Columns of the output on this rank."""
        return sum(table.num_features() * table.local_cols for table in self.embedding_tables)

    def table_names(self) -> list[str]:
        return [table.name for table in self.embedding_tables]

    def feature_names(self) -> list[str]:
        return [name for table in self.embedding_tables for name in table.feature_names]

    def embedding_dims(self) -> list[int]:
        """Columns on this rank, for each feature."""
        return [table.local_cols for table in self.embedding_tables for _ in table.feature_names]

    def embedding_names(self) -> list[str]:
        return [name for table in self.embedding_tables for name in table.embedding_names]
