"""A transformer over jagged rows: blocks of softmax attention and a two-layer feed-forward network."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.attention import Layout, SelfAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderConfig:
    """Sizes of a `TransformerEncoder`.

    Args:
        dim: D, the width of each position.
        blocks: Number of blocks.
        heads: Number of heads.
        hidden: Hidden width of the feed-forward network. None means D, as in SASRec.
        dropout: Dropout of each sublayer's output.
        attention_dropout: Dropout of attention weights. None means `dropout`.
        norm_first: Normalizes the input of each sublayer (pre-LN). False normalizes its sum with the input (post-LN).
        causal: Attend to the position itself and earlier ones only.
    """

    dim: int
    blocks: int = 2
    heads: int = 1
    hidden: int | None = None
    dropout: float = 0.0
    attention_dropout: float | None = None
    norm_first: bool = True
    causal: bool = True


class EncoderBlock(nn.Module):
    """Attention, then two linear layers with a ReLU; each sublayer is added to its input."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        hidden = config.hidden or config.dim
        drops = config.dropout if config.attention_dropout is None else config.attention_dropout
        self.attention = SelfAttention(config.dim, config.heads, config.causal, drops)
        self.norms = nn.ModuleList(nn.LayerNorm(config.dim, eps=1e-8) for _ in range(2))
        self.inner = nn.Linear(config.dim, hidden)
        self.outer = nn.Linear(hidden, config.dim)
        self.dropout = nn.Dropout(config.dropout)
        self.norm_first = config.norm_first

    def forward(self, x_TD: torch.Tensor, layout: Layout) -> torch.Tensor:
        """`[T, D]` to `[T, D]`."""
        attention_norm, feed_forward_norm = self.norms
        if self.norm_first:
            x_TD = x_TD + self.dropout(self.attention(attention_norm(x_TD), layout))
            return x_TD + self._feed_forward(feed_forward_norm(x_TD))
        x_TD = attention_norm(x_TD + self.dropout(self.attention(x_TD, layout)))
        normed: torch.Tensor = feed_forward_norm(x_TD + self._feed_forward(x_TD))
        return normed

    def _feed_forward(self, x_TD: torch.Tensor) -> torch.Tensor:
        output_TD: torch.Tensor = self.dropout(self.outer(self.dropout(F.relu(self.inner(x_TD)))))
        return output_TD


class TransformerEncoder(nn.Module):
    """Blocks from `[T, D]` to `[T, D]`, with a final normalization if blocks normalize their inputs."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(EncoderBlock(config) for _ in range(config.blocks))
        self.last = nn.LayerNorm(config.dim, eps=1e-8) if config.norm_first else nn.Identity()

    def forward(self, x_TD: torch.Tensor, layout: Layout) -> torch.Tensor:
        for block in self.blocks:
            x_TD = block(x_TD, layout)
        output_TD: torch.Tensor = self.last(x_TD)
        return output_TD
