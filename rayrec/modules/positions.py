"""Learned position vectors, and learned attention biases by distance and time."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.attention import Bucket, Layout

TIME_BUCKETS = 128
BLOCK_BYTES = 64 << 20  # of the logarithms of times
LOG_STEP = 0.301  # of natural logarithms of seconds, as in Meta's published form


class Positions(nn.Module):
    """A learned vector for each position in a row.

    Args:
        max_length: Maximum length of a row. Use the schema's `length` to cut longer rows.
        dim: D, the width of the vectors.
        count_from: "newest" gives the last item of a row position 0, "oldest" the first item.
    """

    def __init__(self, max_length: int, dim: int, count_from: str = "newest") -> None:
        super().__init__()
        if count_from not in ("newest", "oldest"):
            raise ValueError(f"positions: count_from={count_from!r} must be 'newest' or 'oldest'")
        self.count_from = count_from
        self.vectors = nn.Parameter(torch.empty(max_length, dim))
        nn.init.normal_(self.vectors, std=0.02)

    def forward(self, layout: Layout) -> torch.Tensor:
        """The vector of each position: `[T, D]`.

        Raises:
            ValueError: A row is longer than `max_length`.
        """
        check_length(layout, len(self.vectors))
        positions = layout.position_in_row
        if layout.items is not None:
            positions = torch.minimum(positions, layout.items[layout.row_of])
        if self.count_from == "newest":
            newest = layout.lengths - 1 if layout.items is None else layout.items  # the place of all candidates
            positions = (newest[layout.row_of] - positions).clamp(min=0)  # below 0: padding
        return self.vectors.index_select(0, positions)


class RelativeBias(nn.Module):
    """A bias for each pair of positions of a row, by their distance and the time between them.

    The time runs from item j to the item after i, the moment of the prediction at i (Zhai et al. 2024,
    arXiv:2402.17152); see `Layout.next_times`.

    Args:
        max_length: N, the maximum length of a row.
        use_times: Whether rows have times.
    """

    def __init__(self, max_length: int, use_times: bool) -> None:
        super().__init__()
        self.max_length = max_length
        self.by_distance = nn.Parameter(torch.empty(2 * max_length - 1))
        self.by_time = nn.Parameter(torch.empty(TIME_BUCKETS + 1)) if use_times else None
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, layout: Layout, bucket: Bucket) -> torch.Tensor:
        """Bias of i (dim 1) for j (dim 2): `[b, width, width]`; `[1, width, width]` without times and candidates.

        Raises:
            ValueError: The model uses times, but the rows have none.
        """
        if bucket.width not in layout.distances:
            places = bucket.places(layout.items, layout.device).int()
            layout.distances[bucket.width] = places[:, None, :] - places[:, :, None] + (self.max_length - 1)
        bias_1NN = F.embedding(layout.distances[bucket.width], self.by_distance[:, None])[..., 0]
        if self.by_time is None:
            return bias_1NN
        if layout.times is None or layout.next_times is None:
            raise ValueError(
                "the model uses times, but the sequence has none: give it a time column, or use_times: false"
            )
        if bucket.width not in layout.time_buckets:
            layout.time_buckets[bucket.width] = _time_buckets(bucket.pad(layout.next_times), bucket.pad(layout.times))
        return bias_1NN + F.embedding(layout.time_buckets[bucket.width], self.by_time[:, None])[..., 0]


def _time_buckets(next_times: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """The bucket of the time from each position's item (dim 2) to the item after each position (dim 1), int32
    `[b, W, W]`, from times `[b, W]`.

    Works on some rows at a time, because the logarithms take several times the memory of the buckets.
    """

    def of(rows: slice) -> torch.Tensor:
        gaps = (next_times[rows, :, None] - times[rows, None, :]).abs_().clamp_(min=1)
        return gaps.double().log_().div_(LOG_STEP).clamp_(max=TIME_BUCKETS).int()

    if torch.compiler.is_exporting():
        return of(slice(None))
    rows = max(1, BLOCK_BYTES // (8 * max(times.shape[1], 1) ** 2))
    return torch.cat([of(slice(start, start + rows)) for start in range(0, max(len(times), 1), rows)])


def check_length(layout: Layout, max_length: int) -> None:
    """Raises ValueError if a row is longer than `max_length`."""
    if layout.width is not None:
        return
    longest = layout.longest if layout.items is None or not len(layout.items) else int(layout.items.max()) + 1
    if longest > max_length:
        raise ValueError(
            f"a row has {longest} items, the model's max_length is {max_length}: cut rows to it, or raise it"
        )
