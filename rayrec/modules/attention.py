"""Attention over rows of different lengths. Shapes: T positions of all rows together, B rows, H heads, D width.

Values stay jagged, `[T, D]` with offsets `[B + 1]`. Only attention scores are padded. Rows of similar length share a
bucket, so that a row of 5 does not pay for a row of 200.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.pooling import row_of

BUCKETS_PER_DOUBLING = 2  # padding adds less than half of a row's length
MIN_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Bucket:
    """Rows of similar length, padded to one width.

    Args:
        rows: `[b]`, the rows.
        width: Padded length.
        source: Their positions in `[T]`.
        target: Their positions in the padded `[b * width]`.
    """

    rows: torch.Tensor
    width: int
    source: torch.Tensor
    target: torch.Tensor

    def pad(self, values: torch.Tensor) -> torch.Tensor:
        """Pads `[T, *]` with zeros to `[b, width, *]`."""
        padded = values.new_zeros(self.rows.shape[0] * self.width, *values.shape[1:])
        padded = padded.index_copy(0, self.target, values.index_select(0, self.source))
        return padded.view(self.rows.shape[0], self.width, *values.shape[1:])

    def visible(
        self,
        lengths_B: torch.Tensor,
        causal: bool,
        items_B: torch.Tensor | None = None,
        local: int | None = None,
        prefix: int = 0,
    ) -> torch.Tensor:
        """`[b, width, width]` bool: whether position i (dim 1) attends to position j (dim 2). Padding is never visible.

        Args:
            lengths_B: Lengths of all rows.
            causal: Attend to the position itself and earlier ones only.
            items_B: Positions of each row before its candidates, which see these and themselves, but not each other.
            local: Attend to the last `local` positions and the first `prefix` positions only; None: to all.
        """
        positions = torch.arange(self.width, device=lengths_B.device)
        visible = (positions < lengths_B[self.rows][:, None])[:, None, :]
        if causal:
            visible = visible & (positions[None, :] <= positions[:, None])
        if items_B is not None:
            itself = positions[None, :] == positions[:, None]
            visible = visible & ((positions < items_B[self.rows][:, None])[:, None, :] | itself)
        if local is not None:
            places = self.places(items_B, lengths_B.device)
            visible = visible & ((places[:, None, :] > places[:, :, None] - local) | (positions < prefix))
        return visible.expand(-1, self.width, -1)

    def places(self, items_B: torch.Tensor | None, device: torch.device) -> torch.Tensor:
        """`[b, width]`, or `[1, width]` without candidates: the place of each position. Candidates of a row have the
        place after its last item, so that their order does not matter."""
        positions = torch.arange(self.width, device=device)[None]
        return positions if items_B is None else torch.minimum(positions, items_B[self.rows][:, None])


class Layout:
    """Positions of the rows of a batch, made once and shared by all layers.

    Args:
        offsets: int64 `[B + 1]`, from 0 to T.
        times: int64 `[T]`, seconds. None if rows have no times.
        next_times: int64 `[T]`, the time of the item after each position. Default: the time of the next position, and
            for a row's last position its own time.
        total: T, if known on the host, which saves a wait for the device.
        width: Pads all rows to this width, as an exported graph requires. None makes buckets of similar lengths.
        items: int64 `[B]`, positions of each row before its candidates. None if rows have no candidates.
    """

    def __init__(
        self,
        offsets: torch.Tensor,
        times: torch.Tensor | None = None,
        next_times: torch.Tensor | None = None,
        total: int | None = None,
        width: int | None = None,
        items: torch.Tensor | None = None,
    ) -> None:
        self.items = items
        self.offsets, self.times = offsets.long(), times
        self.lengths = self.offsets.diff()
        self._next_times, self._total, self.width = next_times, total, width
        self.time_buckets: dict[int, torch.Tensor] = {}  # by width of a bucket; the layers share them
        self.distances: dict[int, torch.Tensor] = {}  # of two positions, from 0; as `time_buckets`

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    def parts(self) -> tuple[dict[str, torch.Tensor], tuple[int, ...]]:
        """What `of_parts` needs on another device: int64 tensors by name, and the widths of the buckets, the longest
        row last."""
        parts = {"offsets": self.offsets, "row_of": self.row_of, "position_in_row": self.position_in_row}
        for number, bucket in enumerate(self.buckets):
            names = zip(("rows", "source", "target"), (bucket.rows, bucket.source, bucket.target), strict=True)
            parts |= {f"{name}{number}": tensor for name, tensor in names}
        if self.times is not None and self.next_times is not None:
            parts |= {"times": self.times, "next_times": self.next_times}
        return parts, (*(bucket.width for bucket in self.buckets), self.longest)

    @classmethod
    def of_parts(cls, parts: Mapping[str, torch.Tensor], widths: tuple[int, ...]) -> Layout:
        """The layout of `parts`, maybe copied to another device, which nothing then waits for."""
        layout = cls(parts["offsets"], parts.get("times"), parts.get("next_times"))
        buckets = [
            Bucket(parts[f"rows{number}"], width, parts[f"source{number}"], parts[f"target{number}"])
            for number, width in enumerate(widths[:-1])
        ]
        known = {"row_of": parts["row_of"], "position_in_row": parts["position_in_row"]}
        vars(layout).update(known, buckets=buckets, longest=widths[-1])
        return layout

    @cached_property
    def row_of(self) -> torch.Tensor:
        """`[T]`: the row of each position."""
        return row_of(self.lengths, self._total)

    @cached_property
    def position_in_row(self) -> torch.Tensor:
        """`[T]`: the number of each position in its row, from 0."""
        return torch.arange(self.row_of.shape[0], device=self.device) - self.offsets[self.row_of]

    @cached_property
    def next_times(self) -> torch.Tensor | None:
        """`[T]`: the time of the item after each position."""
        if self.times is None or self._next_times is not None:
            return self._next_times
        next_times = self.times.roll(-1)
        ends = self.offsets[1:][self.lengths > 0] - 1
        next_times[ends] = self.times[ends]
        return next_times

    @cached_property
    def longest(self) -> int:
        """Length of the longest row. Waits for the device."""
        return int(self.lengths.max()) if len(self.lengths) else 0

    @cached_property
    def buckets(self) -> list[Bucket]:
        """All rows that are not empty, in buckets. Waits for the device."""
        if self.width is not None:
            rows = torch.arange(self.lengths.shape[0], device=self.device)
            source = torch.arange(self.row_of.shape[0], device=self.device)
            return [Bucket(rows, self.width, source, self.row_of * self.width + self.position_in_row)]
        widths_B, buckets = self._widths(max(self.longest, 1)), []
        for width in widths_B[self.lengths > 0].unique().tolist():
            in_bucket = (widths_B == width) & (self.lengths > 0)
            rows = in_bucket.nonzero().flatten()
            source = in_bucket[self.row_of].nonzero().flatten()
            padded_rows = torch.arange(len(rows), device=self.device).repeat_interleave(self.lengths[rows])
            buckets.append(Bucket(rows, width, source, padded_rows * width + self.position_in_row[source]))
        return buckets

    def _widths(self, longest: int) -> torch.Tensor:
        """Width of each row's bucket: a power of 2, or a step between two powers."""
        steps = (self.lengths.clamp(min=MIN_WIDTH).double().log2() * BUCKETS_PER_DOUBLING - 1e-9).ceil()
        return (2 ** (steps / BUCKETS_PER_DOUBLING)).ceil().long().clamp(max=longest)

    def map_buckets(self, values: tuple[torch.Tensor, ...], function: Callable[..., torch.Tensor]) -> torch.Tensor:
        """Applies `function(bucket, *padded) -> [b, width, *]` to each bucket; returns the results as `[T, *]`.

        Without a row, `function` gets the bucket None and empty values.
        """
        if not self.buckets:
            return function(None, *(value[None, :0] for value in values))[0]
        results, sources = [], []
        for bucket in self.buckets:
            padded = function(bucket, *(bucket.pad(value) for value in values))
            results.append(padded.flatten(0, 1).index_select(0, bucket.target))
            sources.append(bucket.source)
        order = torch.cat(sources)
        inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(order.shape[0], device=self.device))
        return torch.cat(results).index_select(0, inverse)


class PaddedLayout(Layout):
    """Rows that are padded to one width, so that no size depends on values, as an exported graph requires.

    T is B * width, and padding follows the items of each row. Results at padded positions are meaningless.

    Args:
        lengths: int64 `[B]`, at most `width`.
        width: Length of every row with its padding.
        times, next_times: int64 `[T]`. None if rows have no times.
    """

    def __init__(
        self,
        lengths: torch.Tensor,
        width: int,
        times: torch.Tensor | None = None,
        next_times: torch.Tensor | None = None,
    ) -> None:
        offsets = width * torch.arange(lengths.shape[0] + 1, device=lengths.device)
        super().__init__(offsets, times, next_times, width=width)
        self.padded_width, self.lengths = width, lengths

    @cached_property
    def row_of(self) -> torch.Tensor:
        rows = torch.arange(self.lengths.shape[0], device=self.device)
        return rows[:, None].expand(-1, self.padded_width).flatten()

    @cached_property
    def position_in_row(self) -> torch.Tensor:
        positions = torch.arange(self.padded_width, device=self.device)
        return positions[None].expand(self.lengths.shape[0], -1).flatten()

    @cached_property
    def buckets(self) -> list[Bucket]:
        rows = torch.arange(self.lengths.shape[0], device=self.device)
        all_positions = torch.arange(self.row_of.shape[0], device=self.device)
        return [Bucket(rows, self.padded_width, all_positions, all_positions)]


class SelfAttention(nn.Module):
    """Multi-head softmax attention within each row (Vaswani et al. 2017).

    Uses scaled-dot-product attention per bucket, and torch's `varlen_attn`, which needs no padding, for 16-bit inputs
    on CUDA without dropout.

    Args:
        dim: D, a multiple of `heads`.
        heads: Number of heads.
        causal: Attend to the position itself and earlier ones only.
        dropout: Dropout of attention weights in training.
    """

    def __init__(self, dim: int, heads: int, causal: bool = True, dropout: float = 0.0) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"attention: dim={dim} must be a multiple of heads={heads}")
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x_TD: torch.Tensor, layout: Layout) -> torch.Tensor:
        """`[T, D]` to `[T, D]`."""
        q, k, v = (projected.unflatten(1, (self.heads, -1)) for projected in self.qkv(x_TD).chunk(3, dim=1))
        drops = self.dropout and self.training
        # Under autocast x, the output of a norm, is float32.
        if q.is_cuda and not drops and q.dtype in (torch.float16, torch.bfloat16):
            attended = self._varlen(q, k, v, layout)
        else:
            attended = layout.map_buckets((q, k, v), self._attend_padded(layout))
        projected_TD: torch.Tensor = self.out(attended.flatten(1))
        return projected_TD

    def _attend_padded(self, layout: Layout) -> Callable[..., torch.Tensor]:
        dropout = self.dropout if self.training else 0.0

        def attend(bucket: Bucket | None, *qkv_BNHd: torch.Tensor) -> torch.Tensor:
            q, k, v = (heads.transpose(1, 2) for heads in qkv_BNHd)
            # Padding comes after a row's last position, so the causal triangle alone hides it.
            causal = self.causal and bucket is not None
            mask = None if causal or bucket is None else bucket.visible(layout.lengths, causal=False)[:, None]
            return F.scaled_dot_product_attention(q, k, v, mask, dropout, is_causal=causal).transpose(1, 2)

        return attend

    def _varlen(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layout: Layout) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        ends, longest = layout.offsets.int(), layout.longest
        window = (-1, 0 if self.causal else -1)
        attended = varlen_attn(q, k, v, ends, ends, longest, longest, window_size=window)
        assert isinstance(attended, torch.Tensor)
        return attended
