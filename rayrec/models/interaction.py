"""How the dense vector and the sparse ones meet. Shapes: B examples, F sparse features, D dims."""

from __future__ import annotations

import torch
from torch import nn


class InteractionArch(nn.Module):
    """Dot products of all pairs among F + 1 vectors (the dense one first), after the dense vector itself.

    Args:
        num_sparse_features: F; without any, the dense vector is passed on.
    """

    _rows: torch.Tensor
    _cols: torch.Tensor

    def __init__(self, num_sparse_features: int) -> None:
        super().__init__()
        self.F = num_sparse_features
        rows, cols = torch.triu_indices(self.F + 1, self.F + 1, offset=1)
        self.register_buffer("_rows", rows, persistent=False)
        self.register_buffer("_cols", cols, persistent=False)

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """`[B, D]` and `[B, F, D]` to `[B, D + F (F + 1) / 2]`."""
        if self.F <= 0:
            return dense_features
        vectors = torch.cat([dense_features[:, None, :], sparse_features], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        return torch.cat([dense_features, products[:, self._rows, self._cols]], dim=1)


class InteractionDCNArch(nn.Module):
    """A cross network over all vectors of an example, side by side.

    Args:
        num_sparse_features: F.
        crossnet: takes `[B, (F + 1) D]`.
    """

    def __init__(self, num_sparse_features: int, crossnet: nn.Module) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.crossnet = crossnet

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """`[B, D]` and `[B, F, D]` to `[B, (F + 1) D]`."""
        if self.F <= 0:
            return dense_features
        crossed: torch.Tensor = self.crossnet(
            torch.cat([dense_features[:, None, :], sparse_features], dim=1).flatten(1)
        )
        return crossed


class InteractionProjectionArch(nn.Module):
    """Two nets over all vectors of an example, whose outputs are multiplied as matrices, after the dense vector.

    Args:
        num_sparse_features: F.
        interaction_branch1: `[B, (F + 1) D]` to `[B, F1 D]`.
        interaction_branch2: `[B, (F + 1) D]` to `[B, F2 D]`.
    """

    def __init__(
        self, num_sparse_features: int, interaction_branch1: nn.Module, interaction_branch2: nn.Module
    ) -> None:
        super().__init__()
        self.F = num_sparse_features
        self.interaction_branch1 = interaction_branch1
        self.interaction_branch2 = interaction_branch2

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """`[B, D]` and `[B, F, D]` to `[B, D + F1 F2]`."""
        if self.F <= 0:
            return dense_features
        batch, dim = dense_features.shape
        flat = torch.cat([dense_features[:, None, :], sparse_features], dim=1).flatten(1)
        left = self.interaction_branch1(flat).reshape(batch, -1, dim)
        right = self.interaction_branch2(flat).reshape(batch, dim, -1)
        return torch.cat([dense_features, torch.bmm(left, right).reshape(batch, -1)], dim=1)
