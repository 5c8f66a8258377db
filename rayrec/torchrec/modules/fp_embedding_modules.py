"""`torchrec.modules.fp_embedding_modules`."""

from rayrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["FeatureProcessedEmbeddingBagCollection"]
