"""Activations, by name, and those with trainable parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from rayrec.modules.norm import NORMS, BatchNorm


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


class PReLU(nn.Module):
    """x where x is positive, else alpha x, with an alpha for each unit (He et al. 2015).

    Args:
        shape: Shape of an example.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.full(shape, 0.25, device=device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, *shape]` to `[B, *shape]`."""
        return torch.where(inputs > 0, inputs, inputs * self.alpha)


class Dice(nn.Module):
    """p x + (1 - p) alpha x, where p = sigmoid of the normalized x (DIN, Zhou et al. 2018, arXiv:1706.06978, eq. 3).

    The normalization is a `BatchNorm` without weight and bias. alpha starts at 0, as in the paper's code.

    Args:
        shape: Shape of an example.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.norm = BatchNorm(shape, affine=False, eps=1e-8, device=device)
        self.alpha = nn.Parameter(torch.zeros(shape, device=device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, *shape]` to `[B, *shape]`."""
        p = torch.sigmoid(self.norm(inputs))
        return inputs * (p + (1 - p) * self.alpha)


ACTIVATIONS: dict[str, Callable[[tuple[int, ...], torch.device | str | None], nn.Module]] = {
    "relu": lambda shape, device: nn.ReLU(),
    "silu": lambda shape, device: nn.SiLU(),
    "gelu": lambda shape, device: nn.GELU(),
    "sigmoid": lambda shape, device: nn.Sigmoid(),
    "prelu": PReLU,
    "dice": Dice,
    "swish_layernorm": lambda shape, device: SwishLayerNorm(shape[-1], device),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerStyle:
    """What follows each linear layer of a network.

    Args:
        activation: A name of `ACTIVATIONS`.
        norm: A name of `norm.NORMS`, applied before the activation. None means no normalization.
        dropout: Probability of zeroing an activation in training.
    """

    activation: str = "relu"
    norm: str | None = None
    dropout: float = 0.0

    def module(self, shape: tuple[int, ...], device: torch.device | str | None = None) -> nn.Module:
        """The normalization and activation of a layer with outputs `[B, *shape]`, without dropout.

        Raises:
            ValueError: An unknown name.
        """
        for kind, name, known in (("activation", self.activation, ACTIVATIONS), ("norm", self.norm, NORMS)):
            if name is not None and name not in known:
                raise ValueError(f"unknown {kind} {name!r}; use one of {', '.join(known)}")
        activation = ACTIVATIONS[self.activation](shape, device)
        return activation if self.norm is None else nn.Sequential(NORMS[self.norm](shape, device), activation)
