"""TorchRec's two components of DeepFM: a dense network and a factorization machine over a list of vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


@torch.fx.wrap  # one node of a traced model, in which the list has no length
def _joined(embeddings: Sequence[torch.Tensor]) -> torch.Tensor:
    """Flattens and concatenates tensors `[B, …]` to `[B, N]`."""
    return torch.cat([block.flatten(1) for block in embeddings], dim=1)


class DeepFM(nn.Module):
    """A dense network over the concatenated vectors of an example.

    Args:
        dense_module: takes `[B, N]`, with N the total number of values of an example.
    """

    def __init__(self, dense_module: nn.Module) -> None:
        super().__init__()
        self.dense_module = dense_module

    def forward(self, embeddings: Sequence[torch.Tensor]) -> torch.Tensor:
        """Returns the output of the network for tensors `[B, …]`."""
        out: torch.Tensor = self.dense_module(_joined(embeddings))
        return out


class FactorizationMachine(nn.Module):
    """Σ_{i<j} x_i x_j over all values of an example (for a sum over its vectors, see `rayrec.models.deepfm`)."""

    def forward(self, embeddings: Sequence[torch.Tensor]) -> torch.Tensor:
        """Maps tensors `[B, …]` to `[B, 1]`."""
        numbers_BN = _joined(embeddings)
        square_of_sum, sum_of_squares = (
            numbers_BN.sum(1, keepdim=True).square(),
            numbers_BN.square().sum(1, keepdim=True),
        )
        return (square_of_sum - sum_of_squares) / 2
