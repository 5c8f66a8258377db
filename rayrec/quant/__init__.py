"""Embedding collections for inference, with tables in fp32, fp16, int8 or int4."""

from rayrec.quant.embedding import EmbeddingBagCollection, EmbeddingCollection
from rayrec.quant.formats import TableFormat
from rayrec.quant.layout import TablePlace, place_tables

__all__ = ["EmbeddingBagCollection", "EmbeddingCollection", "TableFormat", "TablePlace", "place_tables"]
