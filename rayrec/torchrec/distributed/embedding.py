"""`torchrec.distributed.embedding`."""

from rayrec.distributed.collections.embedding import EmbeddingCollectionAwaitable, ShardedEmbeddingCollection
from rayrec.torchrec.distributed.module_sharder import EmbeddingCollectionSharder
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["EmbeddingCollectionAwaitable", "EmbeddingCollectionSharder", "ShardedEmbeddingCollection"]
