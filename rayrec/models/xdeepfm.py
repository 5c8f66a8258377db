"""xDeepFM: a compressed interaction network beside an MLP (Lian et al. 2018, arXiv:1803.05170)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig


class XDeepFM(Ranker):
    """Click probability: logit = linear(fields, p) + MLP(fields), where p are the sums over D of all CIN vectors.

    A vector h of layer k is x_h^k = Σ_ij W_hij^k (x_i^{k-1} ⊙ x_j^0), where x^0 are the F fields.

    Args:
        tables: embedding tables, all with the same `embedding_dim` D.
        num_dense: N, the number of dense features; may be 0.
        deep_arch: layer widths of the MLP; the last is the number of labels.
        cin: vectors in each layer of the compressed interaction network.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the settings do not match; names the one to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        deep_arch: Sequence[int],
        cin: Sequence[int] = (16, 16),
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        super().__init__(tables, num_dense, settings, fields="xdeepfm")
        num_fields, width, device = self.input.num_fields, self.input.width, settings.device
        self.cin = nn.ModuleList(
            nn.Linear(num_fields * inner, outer, bias=False, device=device)
            for inner, outer in zip([num_fields, *cin], cin, strict=False)
        )
        self.linear = nn.Linear(width + sum(cin), settings.num_labels, device=device)
        self.deep = settings.mlp(width, deep_arch, logits_of="xdeepfm.deep_arch")

    def outputs(self, batch: Batch) -> torch.Tensor:
        fields_BFD = self.input.fields(batch)
        fields_BDF = x_BDH = fields_BFD.transpose(1, 2)
        flat = fields_BFD.flatten(1)
        sums = [flat]
        for layer in self.cin:
            products = x_BDH[:, :, :, None] * fields_BDF[:, :, None, :]
            x_BDH = layer(products.flatten(2))
            sums.append(x_BDH.sum(1))
        outputs_BT: torch.Tensor = self.linear(torch.cat(sums, dim=1)) + self.deep(flat)
        return outputs_BT
