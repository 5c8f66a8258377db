"""What an embedding table is: frozen descriptions, checked once when made."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

import torch

InitFn = Callable[[torch.Tensor], object]


class PoolingType(Enum):
    """How the vectors of a bag become one. A weighted mean divides by the number of ids, as fbgemm does."""

    SUM = "SUM"
    MEAN = "MEAN"
    NONE = "NONE"


class DataType(Enum):
    """The number format of a table's weights."""

    FP32 = "FP32"
    FP16 = "FP16"
    BF16 = "BF16"

    @property
    def dtype(self) -> torch.dtype:
        return {"FP32": torch.float32, "FP16": torch.float16, "BF16": torch.bfloat16}[self.value]


@dataclass(frozen=True, kw_only=True)
class BaseEmbeddingConfig:
    """A table of `num_embeddings` rows of `embedding_dim` numbers, read by `feature_names`.

    Args:
        num_embeddings: rows of the table.
        embedding_dim: width of a row; a multiple of 4.
        name: unique inside its collection.
        data_type: format of the weights.
        feature_names: features looked up in this table; a feature may appear in several tables.
        init_fn: fills a block of rows `[n, embedding_dim]` in place; default uniform(±sqrt(1 / num_embeddings)).

    Raises:
        ValueError: a size that is not positive, or a dim that is not a multiple of 4.
    """

    num_embeddings: int
    embedding_dim: int
    name: str = ""
    data_type: DataType = DataType.FP32
    feature_names: list[str] = field(default_factory=list)
    init_fn: InitFn | None = None

    def __post_init__(self) -> None:
        if self.num_embeddings < 1:
            raise ValueError(f"table {self.name!r}: num_embeddings={self.num_embeddings} must be at least 1")
        dim = self.embedding_dim
        if dim < 4 or dim % 4:
            up = max(4, -(-dim // 4) * 4)
            raise ValueError(f"table {self.name!r}: embedding_dim={dim} must be a multiple of 4; try {up}")


@dataclass(frozen=True, kw_only=True)
class EmbeddingBagConfig(BaseEmbeddingConfig):
    """A table whose bags are pooled into one vector."""

    pooling: PoolingType = PoolingType.SUM


@dataclass(frozen=True, kw_only=True)
class EmbeddingConfig(BaseEmbeddingConfig):
    """A table whose rows are returned one by one."""
