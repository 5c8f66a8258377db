"""Cross networks: layers that multiply features with each other. Shapes: B examples, N features, K experts, R rank."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


def _check(name: str, **sizes: int) -> None:
    for setting, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name}: {setting}={size} must be at least 1")


class CrossNet(nn.Module):
    """x_{l+1} = x_0 ⊙ (W_l x_l + b_l) + x_l with full matrices (DCN-v2, Wang et al. 2021, arXiv:2008.13535).

    Args:
        in_features: N.
        num_layers: how often features are crossed; l layers give products of up to l + 1 features.
        device: of the parameters.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, in_features: int, num_layers: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        _check("CrossNet", in_features=in_features, num_layers=num_layers)
        self.kernels = _Kernels(num_layers, (in_features, in_features), device)
        self.bias = _Biases(num_layers, (in_features, 1), device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        crossed = inputs
        for kernel_NN, bias_N1 in zip(self.kernels, self.bias, strict=True):
            crossed = torch.addcmul(crossed, inputs, F.linear(crossed, kernel_NN, bias_N1[:, 0]))
        return crossed


class LowRankCrossNet(nn.Module):
    """x_{l+1} = x_0 ⊙ (W_l (V_l x_l) + b_l) + x_l, the matrices of rank R (DCN-v2, Wang et al. 2021).

    Args:
        in_features: N.
        num_layers: how often features are crossed.
        low_rank: R.
        device: of the parameters.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self, in_features: int, num_layers: int, low_rank: int = 1, device: torch.device | str | None = None
    ) -> None:
        super().__init__()
        _check("LowRankCrossNet", in_features=in_features, num_layers=num_layers, low_rank=low_rank)
        self.W_kernels = _Kernels(num_layers, (in_features, low_rank), device)
        self.V_kernels = _Kernels(num_layers, (low_rank, in_features), device)
        self.bias = _Biases(num_layers, (in_features,), device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        crossed = inputs
        for up_NR, down_RN, bias_N in zip(self.W_kernels, self.V_kernels, self.bias, strict=True):
            crossed = torch.addcmul(crossed, inputs, F.linear(F.linear(crossed, down_RN), up_NR, bias_N))
        return crossed


class VectorCrossNet(nn.Module):
    """x_{l+1} = x_0 (w_l · x_l) + b_l + x_l with a vector a layer (DCN, Wang et al. 2017, arXiv:1708.05123).

    Args:
        in_features: N.
        num_layers: how often features are crossed.
        device: of the parameters.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, in_features: int, num_layers: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        _check("VectorCrossNet", in_features=in_features, num_layers=num_layers)
        self.kernels = _Kernels(num_layers, (in_features, 1), device)
        self.bias = _Biases(num_layers, (in_features, 1), device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        crossed = inputs
        for weight_N1, bias_N1 in zip(self.kernels, self.bias, strict=True):
            crossed = torch.addcmul(crossed + bias_N1[:, 0], inputs, crossed @ weight_N1)
        return crossed


class LowRankMixtureCrossNet(nn.Module):
    """A mixture of K low-rank crosses, weighed by the example itself (DCN-v2, Wang et al. 2021).

    x_{l+1} = Σ_k g_k(x_l) x_0 ⊙ (U_k act(C_k act(V_k x_l)) + b) + x_l, with g a softmax over experts.

    Args:
        in_features: N.
        num_layers: how often features are crossed.
        num_experts: K; a single one needs no weighing.
        low_rank: R.
        activation: act.
        device: of the parameters.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(
        self,
        in_features: int,
        num_layers: int,
        num_experts: int = 1,
        low_rank: int = 1,
        activation: Callable[[torch.Tensor], torch.Tensor] = torch.relu,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        name = "LowRankMixtureCrossNet"
        _check(name, in_features=in_features, num_layers=num_layers, num_experts=num_experts, low_rank=low_rank)
        self.U_kernels = _Kernels(num_layers, (num_experts, in_features, low_rank), device)
        self.V_kernels = _Kernels(num_layers, (num_experts, low_rank, in_features), device)
        self.bias = _Biases(num_layers, (in_features, 1), device)
        if num_experts > 1:
            self.gates: nn.ModuleList | None = nn.ModuleList(
                nn.Linear(in_features, 1, bias=False, device=device) for _ in range(num_experts)
            )
        else:
            self.gates = None
        self.C_kernels = _Kernels(num_layers, (num_experts, low_rank, low_rank), device)
        self._activation = activation

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        crossed, act = inputs, self._activation
        for up_KNR, down_KRN, core_KRR, bias_N1 in zip(
            self.U_kernels, self.V_kernels, self.C_kernels, self.bias, strict=True
        ):
            inner_KBR = act(torch.matmul(crossed, down_KRN.mT))
            outer_KBR = act(torch.matmul(inner_KBR, core_KRR.mT))
            experts_KBN = torch.matmul(outer_KBR, up_KNR.mT) + bias_N1[:, 0]
            if self.gates is None:
                mixed = experts_KBN[0]
            else:
                share_BK = torch.cat([gate(crossed) for gate in self.gates], dim=1).softmax(dim=1)
                mixed = torch.einsum("bk,kbn->bn", share_BK, experts_KBN)
            crossed = torch.addcmul(crossed, inputs, mixed)
        return crossed


class _Kernels(nn.ParameterList):
    """One matrix (or stack of them) a layer, normal so that what it multiplies keeps its size."""

    def __init__(self, count: int, shape: tuple[int, ...], device: torch.device | str | None) -> None:
        super().__init__(nn.Parameter(torch.empty(shape, device=device)) for _ in range(count))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for kernel in self:
            nn.init.xavier_normal_(kernel)


class _Biases(nn.ParameterList):
    """One bias a layer, zero at first."""

    def __init__(self, count: int, shape: tuple[int, ...], device: torch.device | str | None) -> None:
        super().__init__(nn.Parameter(torch.zeros(shape, device=device)) for _ in range(count))

    def reset_parameters(self) -> None:
        for bias in self:
            nn.init.zeros_(bias)
