"""`torchrec.modules.crossnet`: rayrec's cross networks, and two that only TorchRec has.

Shapes: B examples, N features, K experts, R rank.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from rayrec.modules.crossnet import Biases, CrossNet, Kernels, LowRankCrossNet, check_sizes

__all__ = ["CrossNet", "LowRankCrossNet", "LowRankMixtureCrossNet", "VectorCrossNet"]


class VectorCrossNet(nn.Module):
    """x_{l+1} = x_0 (w_l · x_l) + b_l + x_l with a vector a layer (DCN, Wang et al. 2017, arXiv:1708.05123).

    Args:
        in_features: N.
        num_layers: number of cross layers.
        device: device of the parameters.

    Raises:
        ValueError: a size below 1.
    """

    def __init__(self, in_features: int, num_layers: int, device: torch.device | str | None = None) -> None:
        super().__init__()
        check_sizes("VectorCrossNet", in_features=in_features, num_layers=num_layers)
        self.kernels = Kernels(num_layers, (in_features, 1), device)
        self.bias = Biases(num_layers, (in_features, 1), device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        crossed = inputs
        for weight_N1, bias_N1 in zip(self.kernels, self.bias, strict=True):
            crossed = torch.addcmul(crossed + bias_N1[:, 0], inputs, crossed @ weight_N1)
        return crossed


class LowRankMixtureCrossNet(nn.Module):
    """A mixture of K low-rank crosses with gates that depend on the example (DCN-v2, Wang et al. 2021).

    x_{l+1} = Σ_k g_k(x_l) x_0 ⊙ (U_k act(C_k act(V_k x_l)) + b) + x_l, with g a softmax over experts.

    Args:
        in_features: N.
        num_layers: number of cross layers.
        num_experts: K; a single expert has no gate.
        low_rank: R.
        activation: act.
        device: device of the parameters.

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
        check_sizes(name, in_features=in_features, num_layers=num_layers, num_experts=num_experts, low_rank=low_rank)
        self.U_kernels = Kernels(num_layers, (num_experts, in_features, low_rank), device)
        self.V_kernels = Kernels(num_layers, (num_experts, low_rank, in_features), device)
        self.bias = Biases(num_layers, (in_features, 1), device)
        if num_experts > 1:
            self.gates: nn.ModuleList | None = nn.ModuleList(
                nn.Linear(in_features, 1, bias=False, device=device) for _ in range(num_experts)
            )
        else:
            self.gates = None
        self.C_kernels = Kernels(num_layers, (num_experts, low_rank, low_rank), device)
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
