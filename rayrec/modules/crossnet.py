"""Cross networks: layers that multiply features with each other. Shapes: B examples, N features, K experts, R rank."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
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
        self.layers = nn.ModuleList(nn.Linear(in_features, in_features, device=device) for _ in range(num_layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        crossed = inputs
        for layer in self.layers:
            crossed = torch.addcmul(crossed, inputs, layer(crossed))
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
        self.down = nn.ModuleList(
            nn.Linear(in_features, low_rank, bias=False, device=device) for _ in range(num_layers)
        )
        self.up = nn.ModuleList(nn.Linear(low_rank, in_features, device=device) for _ in range(num_layers))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        crossed = inputs
        for down, up in zip(self.down, self.up, strict=True):
            crossed = torch.addcmul(crossed, inputs, up(down(crossed)))
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
        self.weight_LN = nn.Parameter(torch.empty(num_layers, in_features, device=device))
        self.bias_LN = nn.Parameter(torch.empty(num_layers, in_features, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal weights that keep the size of an example, zero biases."""
        nn.init.normal_(self.weight_LN, std=1 / math.sqrt(self.weight_LN.shape[1]))
        nn.init.zeros_(self.bias_LN)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        crossed = inputs
        for weight, bias in zip(self.weight_LN, self.bias_LN, strict=True):
            crossed = torch.addcmul(crossed + bias, inputs, (crossed @ weight).unsqueeze(1))
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
        layers, experts = num_layers, num_experts
        self.down_LKNR = nn.Parameter(torch.empty(layers, experts, in_features, low_rank, device=device))
        self.core_LKRR = nn.Parameter(torch.empty(layers, experts, low_rank, low_rank, device=device))
        self.up_LKRN = nn.Parameter(torch.empty(layers, experts, low_rank, in_features, device=device))
        self.bias_LN = nn.Parameter(torch.empty(layers, in_features, device=device))
        self.gates = nn.ModuleList(
            nn.Linear(in_features, experts, bias=False, device=device) for _ in range(layers if experts > 1 else 0)
        )
        self._activation = activation
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Normal matrices that keep the size of what they multiply, zero biases."""
        for matrices in (self.down_LKNR, self.core_LKRR, self.up_LKRN):
            nn.init.normal_(matrices, std=1 / math.sqrt(matrices.shape[2]))
        nn.init.zeros_(self.bias_LN)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        crossed, act = inputs, self._activation
        for place, (down, core, up, bias) in enumerate(
            zip(self.down_LKNR, self.core_LKRR, self.up_LKRN, self.bias_LN, strict=True)
        ):
            inner_KBR = act(torch.matmul(act(torch.matmul(crossed, down)), core))
            experts_KBN = torch.matmul(inner_KBR, up)
            if self.gates:
                share_BK = self.gates[place](crossed).softmax(dim=1)
                mixed = torch.einsum("bk,kbn->bn", share_BK, experts_KBN)
            else:
                mixed = experts_KBN[0]
            crossed = torch.addcmul(crossed, inputs, mixed + bias)  # the shares add up to 1, so one bias serves all
        return crossed
