"""Attention over rows of unlike lengths. Shapes: T positions of all rows together, B rows, H heads, D width.

Values stay jagged, `[T, D]` with offsets `[B + 1]`. Only the scores of attention are padded, and there rows of like
length go together in buckets, so that a row of 5 does not pay for a row of 200.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

BUCKETS_EACH_DOUBLING = 2  # a row is padded by less than 1 / 2 of its length
MIN_WIDTH = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Mask:
    """Which positions of its own row a position attends to.

    Args:
        causal: only itself and what stands before it.
        window: only positions less than this far away; None: any distance.
        prefix: the first positions of a row, which attend to each other and to which all others attend.
    """

    causal: bool = True
    window: int | None = None
    prefix: int = 0

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"mask: window={self.window} must be at least 1, which is the position itself")
        if self.prefix < 0:
            raise ValueError(f"mask: prefix={self.prefix} must not be negative")

    @property
    def is_plain_causal(self) -> bool:
        """Whether it is the triangle and no more."""
        return self.causal and self.window is None and not self.prefix

    def allowed(self, lengths_B: torch.Tensor, targets_B: torch.Tensor | None, width: int) -> torch.Tensor:
        """`[B, width, width]` bool: may position i (dim 1) see position j (dim 2). Padding is seen by none.

        Args:
            targets_B: how many of a row's last positions are targets, which see history and not each other.
        """
        place = torch.arange(width, device=lengths_B.device)
        i, j = place[:, None], place[None, :]
        seen = j <= i if self.causal else torch.ones(width, width, dtype=torch.bool, device=place.device)
        if self.window is not None:
            seen = seen & ((i - j).abs() < self.window)
        if self.prefix:
            seen = seen | (j < self.prefix)
        allowed = seen & (place < lengths_B[:, None])[:, None, :]
        if targets_B is not None:
            is_target = place >= (lengths_B - targets_B)[:, None]
            allowed = allowed & (~is_target[:, None, :] | (i == j))
        return allowed


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows of like length: `rows` [b], their places in `[T]` (`source`) and in the padded `[b * width]` (`target`)."""

    rows: torch.Tensor
    width: int
    source: torch.Tensor
    target: torch.Tensor

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """`[T, *]` to `[b, width, *]`, zeros where there is nothing."""
        padded = values.new_zeros(self.rows.shape[0] * self.width, *values.shape[1:])
        padded = padded.index_copy(0, self.target, values.index_select(0, self.source))
        return padded.view(self.rows.shape[0], self.width, *values.shape[1:])


class Layout:
    """How the positions of T lie in rows; made once a batch and shared by all layers.

    Args:
        offsets: int64 `[B + 1]`, from 0 to T.
        times: int64 `[T]`, seconds; None where rows have no times.
        next_times: int64 `[T]`, when the item after each comes; by default that of the next position, and of a row's
            last position its own.
        targets: int64 `[B]`, how many of a row's last positions are targets; None: none.
        total: T, where it is known: spares a wait for the device.
        width: all rows are padded to so much, as a graph that is exported must; None: rows of like length together.
    """

    def __init__(
        self,
        offsets: torch.Tensor,
        times: torch.Tensor | None = None,
        next_times: torch.Tensor | None = None,
        targets: torch.Tensor | None = None,
        total: int | None = None,
        width: int | None = None,
    ) -> None:
        self.offsets, self.times, self.targets = offsets.long(), times, targets
        self.lengths = self.offsets.diff()
        self._next_times, self._total, self.width = next_times, total, width

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    @cached_property
    def row_of(self) -> torch.Tensor:
        """`[T]`: the row of each position."""
        rows = torch.arange(self.lengths.shape[0], device=self.device)
        return rows.repeat_interleave(self.lengths, output_size=self._total)

    @cached_property
    def place_of(self) -> torch.Tensor:
        """`[T]`: the place of each position in its row, from 0."""
        return torch.arange(self.row_of.shape[0], device=self.device) - self.offsets[self.row_of]

    @cached_property
    def next_times(self) -> torch.Tensor | None:
        """`[T]`: when the item after each position comes."""
        if self.times is None or self._next_times is not None:
            return self._next_times
        following = self.times.roll(-1)
        ends = self.offsets[1:][self.lengths > 0] - 1
        following[ends] = self.times[ends]
        return following

    @cached_property
    def longest(self) -> int:
        """The longest row. Waits for the device."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    @cached_property
    def buckets(self) -> list[Bucket]:
        """All rows that are not empty, in buckets. Waits for the device."""
        if self.width is not None:
            rows = torch.arange(self.lengths.shape[0], device=self.device)
            source = torch.arange(self.row_of.shape[0], device=self.device)
            return [Bucket(rows, self.width, source, self.row_of * self.width + self.place_of)]
        widths, made = self._widths(max(self.longest, 1)), []
        for width in widths[self.lengths > 0].unique().tolist():
            mine = (widths == width) & (self.lengths > 0)
            rows = mine.nonzero().flatten()
            source = mine[self.row_of].nonzero().flatten()
            lines = torch.arange(len(rows), device=self.device).repeat_interleave(self.lengths[rows])
            made.append(Bucket(rows, width, source, lines * width + self.place_of[source]))
        return made

    def _widths(self, longest: int) -> torch.Tensor:
        """For each row the width of its bucket: a power of 2, or one of the steps between two."""
        steps = (self.lengths.clamp(min=MIN_WIDTH).double().log2() * BUCKETS_EACH_DOUBLING - 1e-9).ceil()
        return (2 ** (steps / BUCKETS_EACH_DOUBLING)).ceil().long().clamp(max=longest)

    def map_buckets(self, values: tuple[torch.Tensor, ...], function: Callable[..., torch.Tensor]) -> torch.Tensor:
        """`function(bucket, *padded)` to `[b, width, *]` for each bucket, put together as `[T, *]`."""
        if not self.buckets:
            return function(None, *(value[None, :0] for value in values))[0]
        outs, sources = [], []
        for bucket in self.buckets:
            padded = function(bucket, *(bucket.pad(value) for value in values))
            outs.append(padded.flatten(0, 1).index_select(0, bucket.target))
            sources.append(bucket.source)
        order = torch.cat(sources)
        back = torch.empty_like(order).index_copy_(0, order, torch.arange(order.shape[0], device=self.device))
        return torch.cat(outs).index_select(0, back)


class SelfAttention(nn.Module):
    """Multi-head softmax attention within each row (Vaswani et al. 2017).

    On CPU dense scaled-dot-product attention by bucket. On CUDA torch's `varlen_attn`, with no padding, for masks that
    are causal, windowed or neither; others go by bucket.

    Args:
        dim: D, a multiple of `heads`.
        dropout: of the attention weights, while training.
        varlen: False: by bucket on CUDA too.
    """

    def __init__(self, dim: int, heads: int, mask: Mask, dropout: float = 0.0, varlen: bool = True) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"attention: dim={dim} must be a multiple of heads={heads}")
        self.heads, self.mask, self.dropout, self.varlen = heads, mask, dropout, varlen
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x_TD: torch.Tensor, layout: Layout) -> torch.Tensor:
        """`[T, D]` to `[T, D]`."""
        q, k, v = (part.unflatten(1, (self.heads, -1)) for part in self.qkv(x_TD).chunk(3, dim=1))
        if self._takes_varlen(x_TD, layout):
            return self.out(self._on_cuda(q, k, v, layout).flatten(1))
        out: torch.Tensor = self.out(layout.map_buckets((q, k, v), self._padded(layout)).flatten(1))
        return out

    def _padded(self, layout: Layout) -> Callable[..., torch.Tensor]:
        plain = self.mask.is_plain_causal and layout.targets is None
        dropout = self.dropout if self.training else 0.0

        def attend(bucket: Bucket | None, *qkv_BNHd: torch.Tensor) -> torch.Tensor:
            q, k, v = (part.transpose(1, 2) for part in qkv_BNHd)
            mask = None
            if not plain and bucket is not None:
                targets = None if layout.targets is None else layout.targets[bucket.rows]
                mask = self.mask.allowed(layout.lengths[bucket.rows], targets, bucket.width)[:, None]
            # padding stands at the end, so the triangle alone keeps it from all that is read
            causal = plain and bucket is not None
            out = F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal)
            return out.transpose(1, 2)

        return attend

    def _takes_varlen(self, x: torch.Tensor, layout: Layout) -> bool:
        simple = not self.mask.prefix and layout.targets is None and not (self.dropout and self.training)
        return self.varlen and x.is_cuda and simple and x.dtype in (torch.float16, torch.bfloat16)

    def _on_cuda(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        reach = -1 if self.mask.window is None else self.mask.window - 1
        ends, longest = layout.offsets.int(), layout.longest
        window = (reach, 0 if self.mask.causal else reach)
        out = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=window)
        assert isinstance(out, torch.Tensor)
        return out
