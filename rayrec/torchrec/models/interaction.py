"""Interactions of `DLRM_DCN` and `DLRM_Projection`. Shapes: B examples, F sparse features, D dims."""

from __future__ import annotations

import torch
from torch import nn


class InteractionDCNArch(nn.Module):
    """A cross network over the concatenated vectors of an example.

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
    """The dense vector, and the matrix product of two networks over the concatenated vectors of an example.

    Args:
        num_sparse_features: F.
        interaction_branch1: maps `[B, (F + 1) D]` to `[B, F1 D]`.
        interaction_branch2: maps `[B, (F + 1) D]` to `[B, F2 D]`.
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
