"""Gates of features by a part of them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from rayrec.modules.mlp import MLP


class ContextGate(nn.Module):
    """x ⊙ 2 sigmoid(MLP(context)), the feature selection of FinalMLP (Mao et al. 2023, arXiv:2304.00902, eq. 5).

    Args:
        in_size: N, the width of x.
        context: Columns of x that are the context. Empty: a learned vector of `dim` numbers.
        dim: Width of the learned vector.
        hidden: Layer widths of the network, without the last layer of width N.
    """

    _context: torch.Tensor

    def __init__(
        self,
        in_size: int,
        context: Sequence[int],
        dim: int,
        hidden: Sequence[int],
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.register_buffer("_context", torch.tensor(list(context), device=device).long(), persistent=False)
        self.vector = None if context else nn.Parameter(torch.empty(1, dim, device=device))
        if self.vector is not None:
            nn.init.normal_(self.vector, std=0.1)
        width = len(context) or dim
        self.mlp = MLP(width, [*hidden, in_size], activation_on_last=False, device=device)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, N]` to `[B, N]`."""
        context = inputs.index_select(1, self._context) if self.vector is None else self.vector
        gate: torch.Tensor = self.mlp(context)
        return inputs * (2 * gate.sigmoid())
