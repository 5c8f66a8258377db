"""`torchrec.distributed.embeddingbag`."""

from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionAwaitable, ShardedEmbeddingBagCollection
from rayrec.torchrec.distributed.module_sharder import EmbeddingBagCollectionSharder

__all__ = ["EmbeddingBagCollectionAwaitable", "EmbeddingBagCollectionSharder", "ShardedEmbeddingBagCollection"]
