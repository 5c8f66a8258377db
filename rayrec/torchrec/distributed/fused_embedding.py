"""The sharder of `FusedEmbeddingCollection`."""

from __future__ import annotations

from rayrec.torchrec.distributed.module_sharder import EmbeddingCollectionSharder
from rayrec.torchrec.modules.fused_embedding_modules import FusedEmbeddingCollection
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class FusedEmbeddingCollectionSharder(EmbeddingCollectionSharder):
    """Shards a `FusedEmbeddingCollection` with its optimizer; has the arguments of `EmbeddingCollectionSharder`."""

    module_type = FusedEmbeddingCollection  # type: ignore[assignment]
