"""Activations with trainable parameters."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class SwishLayerNorm(nn.Module):
    """x ⊙ sigmoid(LayerNorm(x)).

    Args:
        input_dims: Trailing dimensions to normalize.
        device: Device of the parameters.
    """

    def __init__(self, input_dims: int | Sequence[int], device: torch.device | str | None = None) -> None:
        super().__init__()
        dims = [input_dims] if isinstance(input_dims, int) else list(input_dims)
        self.norm = nn.Sequential(nn.LayerNorm(dims, device=device), nn.Sigmoid())

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Returns a tensor of the input's shape."""
        gate: torch.Tensor = self.norm(inputs)
        return inputs * gate
