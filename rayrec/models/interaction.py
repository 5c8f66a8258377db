"""Pairwise dot products of dense and sparse vectors. Shapes: B examples, F sparse features, D dims."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn


class InteractionArch(nn.Module):
    """Concatenates the dense vector and the dot products of all pairs of the F + 1 vectors, the dense one first.

    Args:
        num_sparse_features: F; with 0 the output is the dense vector.
    """

    _pairs: torch.Tensor
    _pair_of: torch.Tensor

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.F = num_sparse_features
        vectors = self.F + 1
        rows, cols = torch.triu_indices(vectors, vectors, offset=1)
        pair_of = torch.full((vectors, vectors), rows.numel())  # the diagonal has no pair
        pair_of[rows, cols] = pair_of[cols, rows] = torch.arange(rows.numel())
        self.register_buffer("_pairs", rows * vectors + cols, persistent=False)
        self.register_buffer("_pair_of", pair_of.view(-1), persistent=False)

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Maps `[B, D]` and `[B, F, D]` to `[B, D + F (F + 1) / 2]`."""
        if self.F <= 0:
            return dense_features
        vectors = torch.cat([dense_features[:, None, :], sparse_features], dim=1)
        products: torch.Tensor = _PairProducts.apply(vectors, self._pairs, self._pair_of)
        return torch.cat([dense_features, products], dim=1)


class _PairProducts(torch.autograd.Function):
    """Dot products of pairs of vectors, `[B, N, D]` to `[B, P]`.

    The backward is one matrix product; autograd would use two, and a scatter of gradients.

    Args:
        pairs: flat indices of the pairs in a matrix `[N, N]`.
        pair_of: pair of each flat index, on both sides of the diagonal; P for none.
    """

    @staticmethod
    def forward(ctx: Any, vectors: torch.Tensor, pairs: torch.Tensor, pair_of: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(vectors, pair_of)
        return torch.bmm(vectors, vectors.transpose(1, 2)).flatten(1).index_select(1, pairs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        vectors, pair_of = ctx.saved_tensors
        # Under autocast the vectors have a lower precision than the gradient.
        grad_matrix = F.pad(grads[0].to(vectors.dtype), (0, 1)).index_select(1, pair_of)
        return torch.bmm(grad_matrix.view(-1, *[vectors.shape[1]] * 2), vectors), None, None
