"""Stacks of linear layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.activation import SwishLayerNorm
from rayrec.modules.onednn_linear import Linear

Activation = Callable[[torch.Tensor], torch.Tensor]
NAMED: dict[str, Callable[[int, torch.device | str | None], Activation]] = {
    "relu": lambda width, device: torch.relu,
    "sigmoid": lambda width, device: torch.sigmoid,
    "swish_layernorm": lambda width, device: SwishLayerNorm(width, device=device),
}


class Perceptron(nn.Module):
    """One linear layer and an activation.

    Args:
        in_size, out_size: widths.
        bias: the layer has a bias.
        activation: a function of a tensor, or a module, which is part of this one's state.
        device, dtype: of the parameters.
    """

    def __init__(
        self,
        in_size: int,
        out_size: int,
        bias: bool = True,
        activation: Activation = torch.relu,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self._linear = Linear(in_size, out_size, bias=bias, device=device, dtype=dtype)
        self._activation_fn = activation

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, in_size]` to `[B, out_size]`."""
        return self._activation_fn(self._linear(inputs))


class MLP(nn.Module):
    """Linear layers, each followed by an activation and dropout.

    Args:
        in_size: width of the input.
        layer_sizes: width of each layer's output; without any, the input is returned.
        bias: layers have a bias.
        activation: "relu", "sigmoid" or "swish_layernorm"; a function of a tensor; a module, which all layers share; a
            class or function without arguments, which makes a module for each layer.
        device, dtype: of the parameters.
        activation_on_last: the last layer has an activation and dropout too; not so for logits.
        dropout: probability of zeroing an activation in training.

    Raises:
        ValueError: an activation of an unknown name.
    """

    def __init__(
        self,
        in_size: int,
        layer_sizes: Sequence[int],
        bias: bool = True,
        activation: str | nn.Module | Callable[..., Any] = torch.relu,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        activation_on_last: bool = True,
        *,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if isinstance(activation, str) and activation not in NAMED:
            raise ValueError(f"MLP: there is no activation {activation!r}; there are {', '.join(NAMED)}")
        widths = [in_size, *layer_sizes]
        last = len(layer_sizes) - 1
        self._mlp = nn.Sequential(
            *(
                Perceptron(
                    width_in,
                    width_out,
                    bias,
                    _make(activation, width_out, device) if activation_on_last or place < last else nn.Identity(),
                    device,
                    dtype,
                )
                for place, (width_in, width_out) in enumerate(zip(widths, layer_sizes, strict=False))
            )
        )
        self._dropout, self._dropped = dropout, len(layer_sizes) if activation_on_last else last

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, in_size]` to `[B, layer_sizes[-1]]`."""
        for place, layer in enumerate(self._mlp):
            inputs = layer(inputs)
            if self._dropout and place < self._dropped:
                inputs = F.dropout(inputs, self._dropout, self.training)
        return inputs


def _make(
    activation: str | nn.Module | Callable[..., Any], width: int, device: torch.device | str | None
) -> Activation:
    """The activation of one layer."""
    if isinstance(activation, str):
        return NAMED[activation](width, device)
    if isinstance(activation, nn.Module):
        return activation
    if isinstance(activation, type) or _takes_nothing(activation):
        made: Activation = activation()
        return made
    return activation


def _takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether it can be called without arguments: a factory of modules can, a function of a tensor cannot."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # it needs an argument, or is a builtin of torch, which all do
        return False
    return True
