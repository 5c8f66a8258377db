"""`torchrec.quant`."""

from rayrec.torchrec.not_offered import names_left_out
from rayrec.torchrec.quant.embedding_modules import EmbeddingBagCollection, EmbeddingCollection

__getattr__ = names_left_out(__name__)

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection"]
