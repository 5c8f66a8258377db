"""Configs of embedding tables, checked at construction."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch

InitFn = Callable[[torch.Tensor], object]


class PoolingType(Enum):
    """Pooling of the vectors of a bag. A weighted mean divides by the number of ids, as in fbgemm."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class DataType(Enum):
    """Data type of a table's weights. FP32, FP16 and BF16 can be trained; the other types result from quantization."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"
    INT64 = "INT64"
    INT32 = "INT32"
    INT8 = "INT8"
    UINT8 = "UINT8"
    INT4 = "INT4"
    INT2 = "INT2"
    NFP8 = "NFP8"

    @property
    def dtype(self) -> torch.dtype:
        """torch data type of the weights. Numbers of less than a byte are packed."""
        return _DTYPES[self.value]


_DTYPES = {
    "FP32": torch.float32,
    "FP16": torch.float16,
    "BF16": torch.bfloat16,
    "INT64": torch.int64,
    "INT32": torch.int32,
    "INT8": torch.int8,
    "UINT8": torch.uint8,
    "INT4": torch.quint4x2,
    "INT2": torch.quint2x4,
    "NFP8": torch.uint8,
}


@dataclass
class BaseEmbeddingConfig:
    """A table of `num_embeddings` rows of `embedding_dim` numbers, read by `feature_names`.

    Args:
        num_embeddings: Rows of the table.
        embedding_dim: Width of a row.
        name: Unique inside its collection.
        data_type: Data type of the weights.
        feature_names: Features looked up in this table. A feature may read several tables.
        weight_init_max, weight_init_min: Bounds of the uniform initial weights. Default: ±sqrt(1 / num_embeddings).
        init_fn: Fills a block of rows `[n, embedding_dim]` in place, instead of uniform weights.
        num_embeddings_post_pruning, need_pos, input_dim, total_num_buckets: Accepted for TorchRec, not used.
        enable_embedding_update, stash_weights: Accepted for TorchRec, not used.
        use_virtual_table, virtual_table_eviction_policy: A table in a key-value store is refused.

    Raises:
        ValueError: A size that is not positive, or a virtual table.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    weight_init_max: float | None = None
    weight_init_min: float | None = None
    num_embeddings_post_pruning: int | None = None
    init_fn: InitFn | None = None
    need_pos: bool = False
    input_dim: int | None = None
    total_num_buckets: int | None = None
    use_virtual_table: bool = False
    virtual_table_eviction_policy: object | None = None
    enable_embedding_update: bool = False
    stash_weights: bool = False

    def __post_init__(self) -> None:
        for setting in ("num_embeddings", "embedding_dim"):
            if getattr(self, setting) < 1:
                raise ValueError(f"table {self.name!r}: {setting}={getattr(self, setting)} must be at least 1")
        if self.use_virtual_table:
            raise ValueError(
                f"table {self.name!r}: virtual tables are not supported; keep the table in host memory (fused_uvm)"
            )

    def get_weight_init_max(self) -> float:
        """Upper bound of the initial weights."""
        return math.sqrt(1 / self.num_embeddings) if self.weight_init_max is None else self.weight_init_max

    def get_weight_init_min(self) -> float:
        """Lower bound of the initial weights."""
        return -math.sqrt(1 / self.num_embeddings) if self.weight_init_min is None else self.weight_init_min

    def num_features(self) -> int:
        """Number of features that read the table."""
        return len(self.feature_names)


@dataclass
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table with bags that are pooled to one vector each."""

    pooling: PoolingType = PoolingType.SUM


@dataclass
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table that returns the vector of each id."""
