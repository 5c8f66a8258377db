"""Stacks of linear layers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.activation import LayerStyle
from rayrec.modules.onednn_linear import Linear

Activation = Callable[[torch.Tensor], torch.Tensor]


class Perceptron(nn.Module):
    """One linear layer and an activation.

    Args:
        in_size, out_size: Widths.
        bias: Whether the layer has a bias.
        activation: A function of a tensor, or a module, which becomes a submodule.
        device, dtype: Device and data type of the parameters.
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
        in_size: Width of the input.
        layer_sizes: Width of each layer's output. An empty list returns the input.
        bias: Whether layers have a bias.
        activation: A name of `activation.ACTIVATIONS`; a function of a tensor; a module, which all layers share; or
            a class or function without arguments, which creates a module for each layer.
        device, dtype: Device and data type of the parameters.
        activation_on_last: Whether the last layer has an activation and dropout. Use False for logits.
        dropout: Probability of zeroing an activation in training.
        norm: A name of `norm.NORMS`, applied between each layer and its activation, which must be a name, too.

    Raises:
        ValueError: An unknown name.
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
        norm: str | None = None,
    ) -> None:
        super().__init__()
        widths = [in_size, *layer_sizes]
        self.out_size = widths[-1]
        last = len(layer_sizes) - 1
        self._mlp = nn.Sequential(
            *(
                Perceptron(
                    width_in,
                    width_out,
                    bias,
                    _make(activation, width_out, norm, device)
                    if activation_on_last or layer_number < last
                    else nn.Identity(),
                    device,
                    dtype,
                )
                for layer_number, (width_in, width_out) in enumerate(zip(widths, layer_sizes, strict=False))
            )
        )
        self._dropout, self._dropped = dropout, len(layer_sizes) if activation_on_last else last

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, in_size]` to `[B, layer_sizes[-1]]`."""
        for layer_number, layer in enumerate(self._mlp):
            inputs = layer(inputs)
            if self._dropout and layer_number < self._dropped:
                inputs = F.dropout(inputs, self._dropout, self.training)
        return inputs


def _make(
    activation: str | nn.Module | Callable[..., Any], width: int, norm: str | None, device: torch.device | str | None
) -> Activation:
    """Activation of one layer."""
    if isinstance(activation, str):
        return LayerStyle(activation=activation, norm=norm).module((width,), device)
    if isinstance(activation, nn.Module):
        return activation
    if isinstance(activation, type) or _takes_nothing(activation):
        module: Activation = activation()
        return module
    return activation


def _takes_nothing(function: Callable[..., Any]) -> bool:
    """Whether a function can be called without arguments, as a factory of modules but not a function of a tensor."""
    try:
        inspect.signature(function).bind()
    except (TypeError, ValueError):  # an argument is missing, or a torch builtin, which needs one
        return False
    return True
