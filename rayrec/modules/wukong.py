"""A layer of Wukong (Zhang et al. 2024, arXiv:2403.02545). Shapes: B samples, F vectors, D width."""

from __future__ import annotations

import torch
from torch import nn

from rayrec.modules.mlp import MLP


class WukongLayer(nn.Module):
    """LN([FMB(X), LCB(X)] + residual(X)), where FMB(X) = V MLP(LN(X X^T Y)), LCB(X) = W X.

    Y, V, W and the residual are learned matrices; the residual is X itself if the number of vectors stays the same.

    Args:
        in_vectors: F of the input.
        dim: D.
        fm_vectors: Vectors that FMB computes.
        linear_vectors: Vectors that LCB computes.
        rank: Columns of Y.
        mlp: The hidden layers of FMB, from `in_vectors * rank` numbers.
    """

    def __init__(
        self,
        in_vectors: int,
        dim: int,
        fm_vectors: int,
        linear_vectors: int,
        rank: int,
        mlp: MLP,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        out_vectors = fm_vectors + linear_vectors
        self.rank = nn.Linear(in_vectors, rank, bias=False, device=device)
        self.norm_products = nn.LayerNorm(in_vectors * rank, device=device)
        self.mlp, self.fm = mlp, nn.Linear(mlp.out_size, fm_vectors * dim, device=device)
        self.linear = nn.Linear(in_vectors, linear_vectors, bias=False, device=device)
        same = in_vectors == out_vectors
        self.residual = nn.Identity() if same else nn.Linear(in_vectors, out_vectors, bias=False, device=device)
        self.norm = nn.LayerNorm(dim, device=device)

    def forward(self, x_BFD: torch.Tensor) -> torch.Tensor:
        """`[B, F, D]` to `[B, fm_vectors + linear_vectors, D]`."""
        x_BDF = x_BFD.transpose(1, 2)
        # X (X^T Y) needs F k D products, (X X^T) Y needs F² D.
        products = torch.bmm(x_BFD, self.rank(x_BDF)).flatten(1)
        fm = self.fm(self.mlp(self.norm_products(products))).unflatten(1, (-1, x_BFD.shape[2]))
        combined = torch.cat([fm, self.linear(x_BDF).transpose(1, 2)], dim=1)
        normed: torch.Tensor = self.norm(combined + self.residual(x_BDF).transpose(1, 2))
        return normed
