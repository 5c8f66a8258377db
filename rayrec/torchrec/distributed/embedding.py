"""`torchrec.distributed.embedding`."""

from rayrec.distributed.collections.embedding import EmbeddingCollectionAwaitable, ShardedEmbeddingCollection
from rayrec.torchrec.distributed.module_sharder import EmbeddingCollectionSharder

__all__ = ["EmbeddingCollectionAwaitable", "EmbeddingCollectionSharder", "ShardedEmbeddingCollection"]
