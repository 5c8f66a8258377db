"""HSTU, the hierarchical sequential transduction unit (Zhai et al. 2024, arXiv:2402.17152), over jagged rows.

    [U, V, Q, K] = SiLU(LN(X) W)          A = SiLU(Q K^T / sqrt(d) + bias) / N, masked
    Y = X + W_o dropout(LN(A V) * U)

HSTU has no softmax and no feed-forward network. N is a constant, never the padded width, so that the result of a row
does not depend on the other rows of its batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.attention import Bucket, Layout
from rayrec.modules.positions import RelativeBias, check_length


@dataclass(frozen=True, slots=True, kw_only=True)
class HSTUConfig:
    """Sizes of an `HSTUEncoder`.

    Args:
        dim: D, the width of each position.
        max_length: N, the maximum length of a row. Attention weights are divided by it.
        blocks: Number of layers.
        heads: Number of heads.
        qk_dim, v_dim: Widths of each head's queries and keys, and of its values. None means D / heads.
        use_times: Adds a bias by the time between two items. Rows must have times.
        dropout: Dropout of what each layer adds to its input.
        causal: Attend to the position itself and earlier ones only.
        local: Attend to the last `local` positions and the first `prefix` positions only (semi-local attention). None
            means all.
        prefix: Positions at the start of a row that all positions after them see, such as its context.
    """

    dim: int
    max_length: int
    blocks: int = 2
    heads: int = 1
    qk_dim: int | None = None
    v_dim: int | None = None
    use_times: bool = False
    dropout: float = 0.0
    causal: bool = True
    local: int | None = None
    prefix: int = 0


class HSTULayer(nn.Module):
    """One layer: `[T, D]` to `[T, D]`."""

    def __init__(self, config: HSTUConfig) -> None:
        super().__init__()
        self.heads, self.causal, self.N = config.heads, config.causal, config.max_length
        self.local, self.prefix = config.local, config.prefix
        self.qk_dim = config.qk_dim or config.dim // config.heads
        self.v_dim = config.v_dim or config.dim // config.heads
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
        by_head = tuple(projected.unflatten(1, (self.heads, -1)) for projected in (q, k, v))
        attended = layout.map_buckets(by_head, self._attend_padded(layout)).flatten(1)
        return x_TD + self.out(self.dropout(self.norm_attended(attended) * u))

    def _attend_padded(self, layout: Layout) -> Callable[..., torch.Tensor]:
        def attend(bucket: Bucket | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            if bucket is None:  # every parameter takes part in backward, even on a rank without rows
                return v + 0 * sum(weight.sum() for weight in self.bias.parameters())
            scores = self.qk_dim**-0.5 * torch.einsum("bihd,bjhd->bhij", q, k)
            scores = F.silu(scores + self.bias(layout, bucket)[:, None]) / self.N
            visible = bucket.visible(layout.lengths, self.causal, layout.items, self.local, self.prefix)[:, None]
            return torch.einsum("bhij,bjhd->bihd", scores * visible, v)

        return attend


class HSTUEncoder(nn.Module):
    """Layers of HSTU, with the interface of `TransformerEncoder`.

    Raises:
        ValueError: A row is longer than `max_length`.
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
