"""`torchrec.quant`."""

from rayrec.quant import EmbeddingBagCollection, EmbeddingCollection

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]
