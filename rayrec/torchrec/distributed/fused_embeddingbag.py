"""The sharder of bag collections that have their optimizer from the start."""

from __future__ import annotations

from rayrec.distributed.collections.embedding_bag import EmbeddingBagCollectionSharder
from rayrec.torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection


class FusedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards a `FusedEmbeddingBagCollection`, whose optimizer the shards keep; settings as of `CollectionSharder`."""

    module_type = FusedEmbeddingBagCollection  # type: ignore[assignment]
