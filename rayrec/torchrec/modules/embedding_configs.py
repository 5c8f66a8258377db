"""Table configs (defined in `rayrec.modules.configs`), conversions, and configs that only TorchRec has."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple

import torch

from rayrec.modules.configs import BaseEmbeddingConfig, DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "BaseEmbeddingConfig",
    "DataType",
    "EmbeddingBagConfig",
    "EmbeddingConfig",
    "EmbeddingTableConfig",
    "PoolingType",
    "QuantConfig",
    "ShardingType",
    "data_type_to_dtype",
    "data_type_to_sparse_type",
    "dtype_to_data_type",
    "pooling_type_to_pooling_mode",
    "pooling_type_to_str",
]


class ShardingType(Enum):
    """Sharding types of TorchRec's inference code; plans use `ShardingType` of `rayrec.distributed`."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    COLUMN_WISE = "column_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    TABLE_COLUMN_WISE = "table_column_wise"


@dataclass
class EmbeddingTableConfig(BaseEmbeddingConfig):
    """A table config with the arguments of its kernel."""

    pooling: PoolingType = PoolingType.SUM
    is_weighted: bool = False
    has_feature_processor: bool = False
    embedding_names: list[str] = field(default_factory=list)


class QuantConfig(NamedTuple):
    """Quantization of activations and weights."""

    activation: Any
    weight: Any
    per_table_weight_dtype: dict[str, torch.dtype] | None = None


def data_type_to_dtype(data_type: DataType) -> torch.dtype:
    """Returns the torch dtype of a data type."""
    return data_type.dtype


def dtype_to_data_type(dtype: torch.dtype) -> DataType:
    """Returns the data type of a torch dtype.

    Raises:
        ValueError: tables cannot have this dtype.
    """
    for data_type in DataType:
        if data_type.dtype == dtype:
            return data_type
    raise ValueError(f"tables cannot have dtype {dtype}; choose one of {', '.join(str(d.dtype) for d in DataType)}")


def data_type_to_sparse_type(data_type: DataType) -> Any:
    """Returns fbgemm's name of a data type."""
    from fbgemm_gpu.split_embedding_configs import SparseType

    return getattr(SparseType, data_type.value)


def pooling_type_to_pooling_mode(pooling_type: PoolingType, sharding_type: ShardingType | None = None) -> Any:
    """Returns fbgemm's name of a pooling. Row-wise shards compute sums; a mean is divided after summing over shards."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

    rows = sharding_type in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)
    is_sharded_mean = rows and pooling_type is PoolingType.MEAN
    return getattr(PoolingMode, "SUM" if is_sharded_mean else pooling_type.value)


def pooling_type_to_str(pooling_type: PoolingType) -> str:
    """Returns torch's name of a pooling, `"sum"` or `"mean"`.

    Raises:
        ValueError: `PoolingType.NONE`.
    """
    if pooling_type is PoolingType.NONE:
        raise ValueError("PoolingType.NONE has no name in torch; use SUM or MEAN")
    return pooling_type.value.lower()


@dataclass(frozen=True)
class VirtualTableEvictionPolicy:
    """Eviction policy of a virtual table. rayrec does not support virtual tables and ignores policies."""

    meta_header_len: int = 0
    embedding_dim: int = 0
    initialized: bool = False


@dataclass(frozen=True)
class CountBasedEvictionPolicy(VirtualTableEvictionPolicy):
    """Evicts rows with few accesses."""

    training_id_eviction_trigger_count: int = 0
    eviction_threshold: int = 15
    decay_rate: float = 0.99
    inference_eviction_threshold: int | None = None


@dataclass(frozen=True)
class TimestampBasedEvictionPolicy(VirtualTableEvictionPolicy):
    """Evicts rows with old accesses."""

    training_id_eviction_trigger_count: int = 0
    eviction_ttl_mins: int = 24 * 60
    inference_eviction_ttl_mins: int | None = None
    max_inference_id_num_per_rank: int = 0


@dataclass(frozen=True)
class CountTimestampMixedEvictionPolicy(VirtualTableEvictionPolicy):
    """Evicts rows with few and old accesses."""

    training_id_eviction_trigger_count: int = 0
    eviction_threshold: int = 15
    decay_rate: float = 0.99
    eviction_ttl_mins: int = 24 * 60
    inference_eviction_threshold: int | None = None
    inference_eviction_ttl_mins: int | None = None


@dataclass(frozen=True)
class FeatureScoreBasedEvictionPolicy(VirtualTableEvictionPolicy):
    """Evicts rows with a low feature score."""

    decay_rate: float = 0.99
    training_id_eviction_trigger_count: int = 0
    training_id_keep_count: int = 0
    eviction_ttl_mins: int = 0
    max_inference_id_num_per_rank: int = 0
    inference_eviction_feature_score_threshold: float | None = None
    inference_eviction_ttl_mins: int | None = None
    feature_score_mapping: dict[str, float] | None = None
    feature_score_default_value: float | None = None
    enable_auto_feature_score_collection: bool = False
    enable_eviction: bool = True


@dataclass(frozen=True)
class FeatureL2NormBasedEvictionPolicy(VirtualTableEvictionPolicy):
    """Evicts rows with a small norm."""

    training_id_eviction_trigger_count: int = 0
    eviction_threshold: float = 0.0
    inference_eviction_threshold: float | None = None


@dataclass(frozen=True)
class NoEvictionPolicy(VirtualTableEvictionPolicy):
    """Evicts no rows."""
