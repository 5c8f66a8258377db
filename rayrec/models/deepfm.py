"""DeepFM: a factorization machine and an MLP on the same vectors (Guo et al. 2017, arXiv:1703.04247)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from rayrec.models.batch import Batch
from rayrec.models.parts import check_logit, common_dim, mean_loss
from rayrec.modules import MLP, EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.modules.fm import pairwise_sum


class DeepFM(nn.Module):
    """Click probability: logit = bias + Σ w_i + Σ_{i<j} <v_i, v_j> + MLP(v_1 … v_n) over all fields.

    A field is a sparse feature, with the pooled vector of its ids, or a dense feature, with its value times a learned
    vector. A field's weight w_i is a learned projection of its vector, so that a table holds all that belongs to an id.

    Args:
        tables: embedding tables, all of one `embedding_dim` D.
        num_dense: N, the number of dense features; 0 is allowed.
        deep_arch: layer widths of the MLP, the last of them 1.
        dropout: in the MLP.
        is_weighted: ids carry weights.
        device: of the dense part; the tables lie on "meta" until they are sharded, unless `tables_device` says
            otherwise.
        seed: of the tables' first weights.

    Raises:
        ValueError: widths that do not fit together, with the setting to change.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        num_dense: int,
        deep_arch: Sequence[int],
        dropout: float = 0.0,
        is_weighted: bool = False,
        device: torch.device | str | None = None,
        tables_device: torch.device | str | None = "meta",
        seed: int | None = None,
    ) -> None:
        super().__init__()
        check_logit("deepfm", "deep_arch", deep_arch)
        self.dim = common_dim("deepfm", tables)
        self.num_sparse = sum(len(table.feature_names) for table in tables)
        num_fields = self.num_sparse + num_dense
        self.embedding_bags = EmbeddingBagCollection(list(tables), is_weighted, device=tables_device, seed=seed)
        self.dense_vectors_ND = nn.Parameter(torch.empty(num_dense, self.dim, device=device))
        self.projection_FD = nn.Parameter(torch.empty(num_fields, self.dim, device=device))
        self.bias = nn.Parameter(torch.empty((), device=device))
        self.deep = MLP(num_fields * self.dim, deep_arch, dropout=dropout, last_linear=True, device=device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Small normal vectors and projections, zero bias."""
        for parameter in (self.dense_vectors_ND, self.projection_FD):
            nn.init.normal_(parameter, std=1 / math.sqrt(self.dim))
        nn.init.zeros_(self.bias)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean binary cross-entropy, logits `[B]`)."""
        pooled = self.embedding_bags(batch.sparse)
        dense_BND = batch.dense[:, :, None] * self.dense_vectors_ND
        sparse_BFD = pooled.values().view(-1, self.num_sparse, self.dim)
        fields_BFD = torch.cat([sparse_BFD, dense_BND], dim=1)
        weights_B = (fields_BFD * self.projection_FD).sum((1, 2))
        logits = self.bias + weights_B + pairwise_sum(fields_BFD) + self.deep(fields_BFD.flatten(1)).squeeze(1)
        return mean_loss(logits, batch.label), logits
