"""The sharder of `FusedEmbeddingBagCollection`."""

from __future__ import annotations

from rayrec.torchrec.distributed.module_sharder import EmbeddingBagCollectionSharder
from rayrec.torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class FusedEmbeddingBagCollectionSharder(EmbeddingBagCollectionSharder):
    """Shards a `FusedEmbeddingBagCollection` with its optimizer; see `EmbeddingBagCollectionSharder` for arguments."""

    module_type = FusedEmbeddingBagCollection  # type: ignore[assignment]
