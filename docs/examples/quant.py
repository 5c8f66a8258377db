"""Tables of few bits, for scoring."""

import torch

from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.quant import EmbeddingBagCollection as QuantEmbeddingBagCollection
from rayrec.quant import TableFormat, place_tables
from rayrec.sparse import KeyedJaggedTensor
from rayrec.torchrec.inference import quantize_inference_model

tables = [EmbeddingBagConfig(50, 8, name, feature_names=[name]) for name in ("user", "item")]
places, total_bytes = place_tables(tables, {"user": TableFormat.INT8, "item": TableFormat.FP16})
assert [place.table for place in places] == ["user", "item"] and total_bytes < 2 * 50 * 8 * 4

model = torch.nn.Sequential(EmbeddingBagCollection(tables))
ids = KeyedJaggedTensor(["user", "item"], torch.tensor([1, 2]), lengths=torch.tensor([1, 1]))
before = model(ids).values()
small = quantize_inference_model(model)
assert isinstance(small[0], QuantEmbeddingBagCollection)
torch.testing.assert_close(small(ids).values(), before, atol=2e-3, rtol=0)
