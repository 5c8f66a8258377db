"""Cross networks: layers that multiply features with each other. Shapes: B samples, N features, R rank."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


def check_sizes(name: str, **sizes: int) -> None:
    """Raises ValueError for a size below 1."""
    for setting, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: {setting}={size} must be at least 1")


class CrossNet(nn.Module):
    """x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l with full matrices (DCN-v2, Wang et al. 2021, arXiv:2008.13535).

    Args:
        in_features: N.
        num_layers: Number of layers; l layers give products of up to l + 1 features.
        device: Device of the parameters.

    Raises:
        ValueError: A size below 1.
    """

    def __init__(self, in_features: int, num_layers: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        check_sizes("CrossNet", in_features=in_features, num_layers=num_layers)
        self.kernels = Kernels(num_layers, (in_features, in_features), device)
        self.bias = Biases(num_layers, (in_features, 1), device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        crossed = inputs
        for kernel_NN, bias_N1 in zip(self.kernels, self.bias, strict=True):
            crossed = torch.addcmul(crossed, inputs, F.linear(crossed, kernel_NN, bias_N1[:, 0]))
        return crossed


class LowRankCrossNet(nn.Module):
    """x_{l+1} = x_0 ⊙ (W_l (V_l x_l) + b_l) + x_l with matrices of rank R (DCN-v2, Wang et al. 2021).

    Args:
        in_features: N.
        num_layers: Number of layers.
        low_rank: R.
        device: Device of the parameters.

    Raises:
        ValueError: A size below 1.
    """

    def __init__(
        self, in_features: int, num_layers: int, low_rank: int = 1, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        check_sizes("LowRankCrossNet", in_features=in_features, num_layers=num_layers, low_rank=low_rank)
        self.W_kernels = Kernels(num_layers, (in_features, low_rank), device)
        self.V_kernels = Kernels(num_layers, (low_rank, in_features), device)
        self.bias = Biases(num_layers, (in_features,), device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        crossed = inputs
        for up_NR, down_RN, bias_N in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            crossed = torch.addcmul(crossed, inputs, F.linear(F.linear(crossed, down_RN), up_NR, bias_N))
        return crossed


class Kernels(nn.ParameterList):
    """One matrix, or stack of matrices, per layer, with Xavier-normal initial values."""

    def __init__(self, count: int, shape: tuple[int, ...], device: torch.device | str | None) -> None:
        super().__init__(nn.Parameter(torch.empty(shape, device=device)) for _ in range(count))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for kernel in self:
            nn.init.xavier_normal_(kernel)


class Biases(nn.ParameterList):
    """One bias per layer, initially zero."""

    def __init__(self, count: int, shape: tuple[int, ...], device: torch.device | str | None) -> None:
        super().__init__(nn.Parameter(torch.zeros(shape, device=device)) for _ in range(count))

    def reset_parameters(self) -> None:
        for bias in self:
            nn.init.zeros_(bias)
