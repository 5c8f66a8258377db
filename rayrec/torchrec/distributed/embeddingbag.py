"""`torchrec.distributed.embeddingbag`."""

from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionAwaitable, ShardedEmbeddingBagCollection
from rayrec.torchrec.distributed.module_sharder import EmbeddingBagCollectionSharder
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["EmbeddingBagCollectionAwaitable", "EmbeddingBagCollectionSharder", "ShardedEmbeddingBagCollection"]
