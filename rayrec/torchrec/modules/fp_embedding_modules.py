"""`torchrec.modules.fp_embedding_modules`."""

from rayrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection

__all__ = ["FeatureProcessedEmbeddingBagCollection"]
