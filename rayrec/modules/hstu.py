"""HSTU, the hierarchical sequential transduction unit (Zhai et al. 2024, arXiv:2402.17152), over jagged rows.

    [U, V, Q, K] = SiLU(LN(X) W)          A = SiLU(alpha Q K^T + bias) / N, masked
    Y = X + W_o dropout(LN(A V) * U)

No softmax, and no network for each position after it. N is a constant, never the padded width: what a row gives does
not depend on the rows it is batched with.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.attention import Bucket, Layout, Mask
from rayrec.modules.positions import RelativeBias, check_length


@dataclass(frozen=True, slots=True, kw_only=True)
class HSTUConfig:
    """Sizes of an `HSTUEncoder`.

    Args:
        dim: D, the width of each position.
        max_length: N, items and targets of a row at most; attention is divided by it.
        heads, qk_dim, v_dim: heads, and the width of each; None: D / heads.
        alpha: factor of Q K^T; None: 1 / sqrt(qk_dim).
        use_times: a bias by the time between two items; rows must have times.
        dropout: of what is added to the input.
    """

    dim: int
    max_length: int
    blocks: int = 2
    heads: int = 1
    qk_dim: int | None = None
    v_dim: int | None = None
    alpha: float | None = None
    use_times: bool = False
    dropout: float = 0.0
    mask: Mask = field(default_factory=Mask)


class HSTULayer(nn.Module):
    """One layer; `[T, D]` to `[T, D]`."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.heads, self.mask, self.N = config.heads, config.mask, config.max_length
        self.qk_dim = config.qk_dim or config.dim // config.heads
        self.v_dim = config.v_dim or config.dim // config.heads
        self.alpha = self.qk_dim**-0.5 if config.alpha is None else config.alpha
        self.dropout = nn.Dropout(config.dropout)
        self.widths = [self.heads * width for width in (self.v_dim, self.v_dim, self.qk_dim, self.qk_dim)]
        self.norm = nn.LayerNorm(config.dim, eps=1e-6)
        self.uvqk = nn.Linear(config.dim, sum(self.widths), bias=False)
        self.norm_attended = nn.LayerNorm(self.heads * self.v_dim, eps=1e-6)
        self.out = nn.Linear(self.heads * self.v_dim, config.dim)
        self.bias = RelativeBias(self.N, config.use_times)
        nn.init.normal_(self.uvqk.weight, std=0.02)
        nn.init.xavier_uniform_(self.out.weight)

    def forward(self, x_TD: torch.Tensor, layout: Layout) -> torch.Tensor:
        u, v, q, k = F.silu(self.uvqk(self.norm(x_TD))).split(self.widths, dim=1)
        by_head = tuple(part.unflatten(1, (self.heads, -1)) for part in (q, k, v))
        attended = layout.map_buckets(by_head, self._padded(layout)).flatten(1)
        return x_TD + self.out(self.dropout(self.norm_attended(attended) * u))

    def _padded(self, layout: Layout) -> Callable[..., torch.Tensor]:
        def attend(bucket: Bucket | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if bucket is None:  # every parameter takes part in backward, also on a rank without rows
                return v + 0 * sum(weight.sum() for weight in self.bias.parameters())
            lengths = layout.lengths[bucket.rows]
            targets = None if layout.targets is None else layout.targets[bucket.rows]
            scores = self.alpha * torch.einsum("bihd,bjhd->bhij", q, k)
            scores = F.silu(scores + self.bias(layout, bucket)[:, None]) / self.N
            allowed = self.mask.allowed(lengths, targets, bucket.width)[:, None]
            return torch.einsum("bhij,bjhd->bihd", scores * allowed, v)

        return attend


class HSTUEncoder(nn.Module):
    """Layers of HSTU; the same interface as `TransformerEncoder`.

    Raises:
        ValueError: a row is longer than `max_length`.
    """

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.max_length = config.max_length
        self.layers = nn.ModuleList(HSTULayer(config) for _ in range(config.blocks))

    def forward(self, x_TD: torch.Tensor, layout: Layout) -> torch.Tensor:
        check_length(layout, self.max_length)
        for layer in self.layers:
            x_TD = layer(x_TD, layout)
        return x_TD
