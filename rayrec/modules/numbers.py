"""Vectors of numbers (Gorishniy et al. 2022, arXiv:2203.05556). Shapes: B samples, N numbers, K encoded, D width."""

from __future__ import annotations

import math

import torch
from torch import nn


class LinearVectors(nn.Module):
    """x_n v_n + b_n for each number n, with learned v_n and b_n.

    Args:
        num: N.
        dim: D.
    """

    def __init__(self, num: int, dim: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight_ND = nn.Parameter(torch.empty(num, dim, device=device))
        self.bias_ND = nn.Parameter(torch.empty(num, dim, device=device))
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -1 / math.sqrt(dim), 1 / math.sqrt(dim))

    def forward(self, numbers_BN: torch.Tensor) -> torch.Tensor:
        """`[B, N, D]`."""
        return numbers_BN[:, :, None] * self.weight_ND + self.bias_ND


class EncodedVectors(nn.Module):
    """ReLU(W_n encode_n(x_n) + b_n) for each number n, with learned W_n and b_n.

    Args:
        encode: A module from `[B, N]` to `[B, N, K]`.
        num: N.
        width: K.
        dim: D.
    """

    def __init__(
        self, encode: nn.Module, num: int, width: int, dim: int, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        self.encode = encode
        self.weight_NKD = nn.Parameter(torch.empty(num, width, dim, device=device))
        self.bias_N1D = nn.Parameter(torch.empty(num, 1, dim, device=device))
        for parameter in (self.weight_NKD, self.bias_N1D):
            nn.init.uniform_(parameter, -1 / math.sqrt(width), 1 / math.sqrt(width))

    def forward(self, numbers_BN: torch.Tensor) -> torch.Tensor:
        """`[B, N, D]`."""
        encoded_NBK = self.encode(numbers_BN).transpose(0, 1)
        return torch.baddbmm(self.bias_N1D, encoded_NBK, self.weight_NKD).transpose(0, 1).relu()


class Periodic(nn.Module):
    """[sin(2 pi c_n x_n), cos(2 pi c_n x_n)] with learned frequencies c_n, initially normal.

    Args:
        num: N.
        frequencies: Frequencies of each number, K / 2.
        sigma: Standard deviation of the initial frequencies. The paper tunes it between 0.01 and 100.
    """

    def __init__(self, num: int, frequencies: int, sigma: float, device: torch.device | str | None = None) -> None:
        super().__init__()
        self.frequency_NK = nn.Parameter(torch.empty(num, frequencies, device=device))
        nn.init.normal_(self.frequency_NK, std=sigma)

    def forward(self, numbers_BN: torch.Tensor) -> torch.Tensor:
        """`[B, N, K]`."""
        angles = 2 * math.pi * self.frequency_NK * numbers_BN[:, :, None]
        return torch.cat([angles.sin(), angles.cos()], dim=2)


class PiecewiseLinear(nn.Module):
    """The piecewise-linear encoding for K equal bins of [0, 1]: 1 for a bin below x, 0 for one above it, and for the
    bin of x the share of the bin that lies below x.

    On ranks among K quantiles (the `quantile` transform of the schema), this is the paper's encoding with K quantiles
    as the edges.

    Args:
        bins: K.
    """

    def __init__(self, bins: int) -> None:
        super().__init__()
        self.bins = bins

    def forward(self, numbers_BN: torch.Tensor) -> torch.Tensor:
        """`[B, N, K]`."""
        starts_K = torch.arange(self.bins, device=numbers_BN.device)
        return (numbers_BN[:, :, None] * self.bins - starts_K).clamp(0, 1)
