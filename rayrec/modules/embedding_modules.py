"""Where users of other libraries of this kind look for the collections; they are written in `embedding`."""

from rayrec.modules.embedding import EmbeddingBagCollection, EmbeddingCollection

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]
