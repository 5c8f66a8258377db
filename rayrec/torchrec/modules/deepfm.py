"""DeepFM's two halves over a list of vectors, as TorchRec cuts the model: a dense net, and a factorization machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


def _joined(embeddings: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[B, …]` each, as one `[B, all numbers]`."""
    return torch.cat([block.flatten(1) for block in embeddings], dim=1)


class DeepFM(nn.Module):
    """All vectors of an example, side by side, through a dense net.

    Args:
        dense_module: takes `[B, sum of all numbers of an example]`.
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: Sequence[torch.Tensor]) -> torch.Tensor:
        """What the net makes of tensors of shape `[B, …]`."""
        out: torch.Tensor = self.dense_module(_joined(embeddings))
        return out


class FactorizationMachine(nn.Module):
    """Σ_{i<j} x_i x_j over all numbers of an example (for a sum over its vectors, see `rayrec.models.deepfm`)."""

    def forward(self, embeddings: Sequence[torch.Tensor]) -> torch.Tensor:
        """`[B, 1]` of tensors of shape `[B, …]`."""
        numbers_BN = _joined(embeddings)
        square_of_sum, sum_of_squares = (
            numbers_BN.sum(1, keepdim=True).square(),
            numbers_BN.square().sum(1, keepdim=True),
        )
        return (square_of_sum - sum_of_squares) / 2
