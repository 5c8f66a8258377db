"""DeepFM: a factorization machine and an MLP on the same vectors (Guo et al. 2017, arXiv:1703.04247)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.loss import common_dim
from rayrec.models.ranker import IdWeights, ModelInputs, Ranker
from rayrec.modules import EmbeddingBagConfig


class DeepFM(Ranker):
    """Click probability: logit = bias + Σ w_i + Σ_{i<j} <v_i, v_j> + MLP(v_1 … v_n) over all fields.

    A field is a sparse feature, with the pooled vector of its ids, an attended history, or a dense feature, with its
    value times a learned vector or, by `numbers`, another vector of its value. The weight w_i of a field is a learned
    projection of its vector, so an id needs no second table; or, as in the paper, ids have weights of their own, in
    tables of dim 1. With several labels, each has its own bias, projections and MLP output, and all share the pairwise
    sum and the ids' own weights.

    Args:
        tables: embedding tables, all with the same `embedding_dim` D, except those of `wide`.
        num_dense: N, the number of dense features; may be 0.
        deep_arch: layer widths of the MLP; the last is the number of labels.
        wide: features of tables of dim 1, whose ids have their weights there; of a feature that several tables read,
            `feature@table`. Only dense features then have projections. Empty: all fields have.
        inputs: fields of `ModelInputs`.

    Raises:
        ValueError: the widths do not match; names the setting to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        deep_arch: Sequence[int],
        wide: Sequence[str] = (),
        **inputs: Annotated[Any, ModelInputs],
    ) -> None:
        settings = ModelInputs(**inputs)
        dim, device = common_dim("deepfm", [t for t in tables if not wide or t.embedding_dim > 1]), settings.device
        if wide and settings.number_dim is None:
            settings = replace(settings, number_dim=dim)
        # Numbers that are plain have vectors of this class, as in checkpoints from before other forms existed.
        is_plain = settings.numbers == "plain"
        super().__init__(tables, num_dense, settings, fields=None if is_plain or wide else "deepfm")
        self.dim = dim
        self.id_weights = IdWeights("deepfm", wide, self.input, dim, device) if wide else None
        pooled = self.input.width - self.input.numbers_width
        num_fields = num_dense + (pooled // dim if self.id_weights is None else self.id_weights.num_fields)
        self.embedding_bags = self.input.lookup.release_bags()
        self.dense_vectors_ND = nn.Parameter(torch.empty(num_dense, dim, device=device)) if is_plain else None
        labels = () if settings.task_weights is None else (settings.num_labels,)
        projected = num_dense if wide else num_fields
        self.projection_FD = nn.Parameter(torch.empty(projected, dim, *labels, device=device))
        self.bias = nn.Parameter(torch.empty(labels, device=device))
        self.deep = settings.mlp(num_fields * dim, deep_arch, logits_of="deepfm.deep_arch")
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initializes vectors and projections from a narrow normal distribution, and the bias with zeros."""
        for parameter in (self.dense_vectors_ND, self.projection_FD):
            if parameter is not None:
                nn.init.normal_(parameter, std=1 / math.sqrt(self.dim))
        nn.init.zeros_(self.bias)

    def outputs(self, batch: Batch) -> torch.Tensor:
        if self.dense_vectors_ND is None:
            numbers_BV = self.input.numbers(batch)
        else:
            numbers_BV = (batch.dense[:, :, None] * self.dense_vectors_ND).flatten(1)
        vectors_BV = self.input.vectors(batch, self.embedding_bags)
        linear_BT: torch.Tensor | float = 0.0
        if self.id_weights is not None:
            vectors_BV, linear_BT = self.id_weights(vectors_BV)
        flat_BV = torch.cat([vectors_BV, numbers_BV], dim=1)
        projection = self.projection_FD.flatten(0, 1)
        projected_BV = flat_BV if self.id_weights is None else numbers_BV
        linear_BT = linear_BT + self.bias + projected_BV @ projection.view(len(projection), -1)
        fields_BFD = flat_BV.unflatten(1, (-1, self.dim))
        outputs_BT: torch.Tensor = linear_BT + pairwise_sum(fields_BFD)[:, None] + self.deep(flat_BV)
        return outputs_BT


def pairwise_sum(vectors_BFD: torch.Tensor) -> torch.Tensor:
    """Returns Σ_{i<j} <v_i, v_j> of each example, `[B]`, in time linear in F (Rendle 2010, equation 5)."""
    square_of_sum_BD = vectors_BFD.sum(1).square()
    sum_of_squares_BD = vectors_BFD.square().sum(1)
    return (square_of_sum_BD - sum_of_squares_BD).sum(1) / 2
