"""The sharder of collections of single vectors that have their optimizer from the start."""

from __future__ import annotations

from rayrec.distributed.collections.embedding import EmbeddingCollectionSharder
from rayrec.torchrec.modules.fused_embedding_modules import FusedEmbeddingCollection


class FusedEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Shards a `FusedEmbeddingCollection`, whose optimizer the shards keep; settings as of `CollectionSharder`."""

    module_type = FusedEmbeddingCollection  # type: ignore[assignment]
