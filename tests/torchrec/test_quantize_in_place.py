"""`quantize_inference_model`: every collection of a model, in place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from rayrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, quant
from rayrec.quant import TableFormat
from rayrec.torchrec.inference import quantize_inference_model


class Sums(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(
            [EmbeddingBagCollection([table("a", "x")]), EmbeddingBagCollection([table("b", "y")])]
        )

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return torch.cat([bags(features).values() for bags in self.inner], dim=1)


def table(name: str, feature: str) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(name=name, num_embeddings=20, embedding_dim=8, feature_names=[feature])


def test_every_collection_is_replaced_and_scores_stay_near() -> None:
    model, batch = Sums(), KeyedJaggedTensor(["x", "y"], torch.arange(6), lengths=torch.tensor([1, 2, 0, 3]))
    before = model(batch).detach()
    assert quantize_inference_model(model, {"b": "fp16"}, fp_weight_dtype=torch.int8) is model
    kinds = {name: kind for bags in model.inner for name, kind in bags.formats().items()}
    assert kinds == {"a": TableFormat.INT8, "b": TableFormat.FP16}
    torch.testing.assert_close(model(batch), before, rtol=0, atol=0.01)
    assert (model(batch) != before).any()
    assert isinstance(quantize_inference_model(EmbeddingBagCollection([table("a", "x")])), quant.EmbeddingBagCollection)
    with pytest.raises(ValueError, match="unknown table 'c'"):
        quantize_inference_model(Sums(), {"c": "int8"})
