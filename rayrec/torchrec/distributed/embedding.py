"""`torchrec.distributed.embedding`."""

from rayrec.distributed.collections.embedding import (
    EmbeddingCollectionAwaitable,
    EmbeddingCollectionSharder,
    ShardedEmbeddingCollection,
)

__all__ = ["EmbeddingCollectionAwaitable", "EmbeddingCollectionSharder", "ShardedEmbeddingCollection"]
