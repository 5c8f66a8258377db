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
    vector. A field's weight w_i is a learned projection of its vector, so that a table holds all that belongs to an id.
    Of several labels, each has a bias, projections and an output of the MLP; the pairwise sum is theirs together.

    Args:
        tables: embedding tables, all of one `embedding_dim` D.
        num_dense: N, the number of dense features; 0 is allowed.
        deep_arch: layer widths of the MLP, the last of them 1, or the number of labels.
        dropout: in the MLP.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: widths that do not fit together, with the setting to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        deep_arch: Sequence[int],
        dropout: float = 0.0,
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        given = ModelInputs(**inputs)
        super().__init__(given)
        check_logits("deepfm", "deep_arch", deep_arch, given.task_weights)
        self.dim, device = common_dim("deepfm", tables), given.device
        self.num_sparse = sum(len(table.feature_names) for table in tables)
        num_fields = self.num_sparse + num_dense
        self.embedding_bags = given.bags(tables)
        self.dense_vectors_ND = nn.Parameter(torch.empty(num_dense, self.dim, device=device))
        labels = () if given.task_weights is None else (given.num_labels,)
        self.projection_FD = nn.Parameter(torch.empty(num_fields, self.dim, *labels, device=device))
        self.bias = nn.Parameter(torch.empty(labels, device=device))
        self.deep = MLP(num_fields * self.dim, deep_arch, dropout=dropout, activation_on_last=False, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small normal vectors and projections, zero bias."""
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
    """Σ_{i<j} <v_i, v_j> for every example, `[B]`, in time linear in F (Rendle 2010, equation 5)."""
    square_of_sum_BD = vectors_BFD.sum(1).square()
    sum_of_squares_BD = vectors_BFD.square().sum(1)
    return (square_of_sum_BD - sum_of_squares_BD).sum(1) / 2
