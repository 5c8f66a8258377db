"""xDeepFM: a compressed interaction network beside an MLP (Lian et al. 2018, arXiv:1803.05170)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.loss import common_dim
from rayrec.models.ranker import IdWeights, ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig


class XDeepFM(Ranker):
    """Click probability: logit = linear(fields, p) + MLP(fields), where p are the sums over D of all CIN vectors.

    A vector h of layer k is x_h^k = Σ_ij W_hij^k (x_i^{k-1} ⊙ x_j^0), where x^0 are the F fields. The linear part
    projects the vectors of fields, so an id needs no second table; or, as in the paper, ids have weights of their own,
    in tables of dim 1, which all labels share.

    Args:
        tables: embedding tables, all with the same `embedding_dim` D, except those of `wide`.
        num_dense: N, the number of dense features; may be 0.
        deep_arch: layer widths of the MLP; the last is the number of labels.
        cin: vectors in each layer of the compressed interaction network.
        wide: features of tables of dim 1, whose ids have their weights there; of a feature that several tables read,
            `feature@table`. The linear part then projects the vectors of numbers alone. Empty: those of all fields.
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
        wide: Sequence[str] = (),
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        dim, device = common_dim("xdeepfm", [t for t in tables if not wide or t.embedding_dim > 1]), settings.device
        if wide:
            numbers: Any = "linear" if settings.numbers == "plain" else settings.numbers
            settings = replace(settings, numbers=numbers, number_dim=settings.number_dim or dim)
        super().__init__(tables, num_dense, settings, fields=None if wide else "xdeepfm")
        self.dim = dim
        self.id_weights = IdWeights("xdeepfm", wide, self.input, dim, device) if wide else None
        num_fields = self.input.num_fields if self.id_weights is None else num_dense + self.id_weights.num_fields
        projected = num_fields * dim if self.id_weights is None else self.input.numbers_width
        self.cin = nn.ModuleList(
            nn.Linear(num_fields * inner, outer, bias=False, device=device)
            for inner, outer in zip([num_fields, *cin], cin, strict=False)
        )
        self.linear = nn.Linear(projected + sum(cin), settings.num_labels, device=device)
        self.deep = settings.mlp(num_fields * dim, deep_arch, logits_of="xdeepfm.deep_arch")

    def outputs(self, batch: Batch) -> torch.Tensor:
        numbers_BV, vectors_BV = self.input.numbers(batch), self.input.vectors(batch)
        weights_B1: torch.Tensor | float = 0.0
        if self.id_weights is not None:
            vectors_BV, weights_B1 = self.id_weights(vectors_BV)
        flat = torch.cat([numbers_BV, vectors_BV], dim=1)
        fields_BDF = x_BDH = flat.unflatten(1, (-1, self.dim)).transpose(1, 2)
        sums = [flat if self.id_weights is None else numbers_BV]
        for layer in self.cin:
            products = x_BDH[:, :, :, None] * fields_BDF[:, :, None, :]
            x_BDH = layer(products.flatten(2))
            sums.append(x_BDH.sum(1))
        outputs_BT: torch.Tensor = self.linear(torch.cat(sums, dim=1)) + self.deep(flat) + weights_B1
        return outputs_BT
