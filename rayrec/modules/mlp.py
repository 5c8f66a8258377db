"""Stacks of linear layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn


class MLP(nn.Module):
    """Linear layers, each followed by an activation and dropout.

    Args:
        in_size: width of the input.
        layer_sizes: width of each layer's output.
        bias: layers have a bias.
        activation: makes the activation module after a layer; None for none.
        dropout: probability of zeroing an activation in training.
        last_linear: the last layer has neither activation nor dropout, as for logits.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: Callable[[], nn.Module] | None = nn.ReLU,
        dropout: float = 0.0,
        last_linear: bool = False,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for place, (size_in, size_out) in enumerate(zip([in_size, *layer_sizes], layer_sizes, strict=False)):
            layers.append(nn.Linear(size_in, size_out, bias=bias, device=device))
            if last_linear and place == len(layer_sizes) - 1:
                break
            if activation is not None:
                layers.append(activation())
            if dropout > 0:
                layers.append(nn.Dropout(dropout))
        self.layers = nn.Sequential(*layers)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, in_size]` to `[B, layer_sizes[-1]]`."""
        return self.layers(inputs)
