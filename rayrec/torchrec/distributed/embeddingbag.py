"""`torchrec.distributed.embeddingbag`."""

from rayrec.distributed.collections.embedding_bag import (
    EmbeddingBagCollectionAwaitable,
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
)

__all__ = ["EmbeddingBagCollectionAwaitable", "EmbeddingBagCollectionSharder", "ShardedEmbeddingBagCollection"]
