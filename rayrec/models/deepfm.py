"""DeepFM: a factorization machine and an MLP on the same vectors (Guo et al. 2017, arXiv:1703.04247)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.loss import check_logits, common_dim
from rayrec.models.ranker import ModelInputs, Ranker
from rayrec.modules import MLP, EmbeddingBagConfig


class DeepFM(Ranker):
    """Click probability: logit = bias + Σ w_i + Σ_{i<j} <v_i, v_j> + MLP(v_1 … v_n) over all fields.

    A field is a sparse feature, with the pooled vector of its ids, or a dense feature, with its value times a learned
    vector. The weight w_i of a field is a learned projection of its vector, so an id needs no second table. With
    several labels, each has its own bias, projections and MLP output, and all share the pairwise sum.

    Args:
        tables: embedding tables, all with the same `embedding_dim` D.
        num_dense: N, the number of dense features; may be 0.
        deep_arch: layer widths of the MLP; the last is the number of labels.
        dropout: dropout of the MLP.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the widths do not match; names the setting to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        deep_arch: Sequence[int],
        dropout: float = 0.0,
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        super().__init__(settings)
        check_logits("deepfm", "deep_arch", deep_arch, settings.task_weights)
        self.dim, device = common_dim("deepfm", tables), settings.device
        self.num_sparse = sum(len(table.feature_names) for table in tables)
        num_fields = self.num_sparse + num_dense
        self.embedding_bags = settings.bags(tables)
        self.dense_vectors_ND = nn.Parameter(torch.empty(num_dense, self.dim, device=device))
        labels = () if settings.task_weights is None else (settings.num_labels,)
        self.projection_FD = nn.Parameter(torch.empty(num_fields, self.dim, *labels, device=device))
        self.bias = nn.Parameter(torch.empty(labels, device=device))
        self.deep = MLP(num_fields * self.dim, deep_arch, dropout=dropout, activation_on_last=False, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes vectors and projections from a narrow normal distribution, and the bias with zeros."""
        for parameter in (self.dense_vectors_ND, self.projection_FD):
            nn.init.normal_(parameter, std=1 / math.sqrt(self.dim))
        nn.init.zeros_(self.bias)

    def outputs(self, batch: Batch) -> torch.Tensor:
        dense_BND = batch.dense[:, :, None] * self.dense_vectors_ND
        sparse_BFD = self.embedding_bags(batch.sparse).values().view(-1, self.num_sparse, self.dim)
        fields_BFD = torch.cat([sparse_BFD, dense_BND], dim=1)
        flat_BV = fields_BFD.flatten(1)
        linear_BT = self.bias + flat_BV @ self.projection_FD.flatten(0, 1).view(flat_BV.shape[1], -1)
        outputs_BT: torch.Tensor = linear_BT + pairwise_sum(fields_BFD)[:, None] + self.deep(flat_BV)
        return outputs_BT


def pairwise_sum(vectors_BFD: torch.Tensor) -> torch.Tensor:
    """Returns Σ_{i<j} <v_i, v_j> of each example, `[B]`, in time linear in F (Rendle 2010, equation 5)."""
    square_of_sum_BD = vectors_BFD.sum(1).square()
    sum_of_squares_BD = vectors_BFD.square().sum(1)
    return (square_of_sum_BD - sum_of_squares_BD).sum(1) / 2
