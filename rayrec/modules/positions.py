"""Learned position vectors, and learned attention biases by distance and time."""

from __future__ import annotations

import torch
from torch import nn

from rayrec.modules.attention import Bucket, Layout

TIME_BUCKETS = 128
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
        if self.count_from == "newest":
            positions = (layout.lengths[layout.row_of] - 1 - positions).clamp(min=0)  # below 0: padding
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
        """Bias of i (dim 1) for j (dim 2): `[b, width, width]`, or `[1, width, width]` without times.

        Raises:
            ValueError: The model uses times, but the rows have none.
        """
        positions = torch.arange(bucket.width, device=layout.device)
        bias_1NN = self.by_distance[positions[None, :] - positions[:, None] + self.max_length - 1][None]
        if self.by_time is None:
            return bias_1NN
        if layout.times is None or layout.next_times is None:
            raise ValueError(
                "the model uses times, but the sequence has none: give it a time column, or use_times: false"
            )
        gaps_BNN = bucket.pad(layout.next_times)[:, :, None] - bucket.pad(layout.times)[:, None, :]
        buckets = (gaps_BNN.abs().clamp(min=1).double().log() / LOG_STEP).long().clamp(max=TIME_BUCKETS)
        return bias_1NN + self.by_time[buckets]


def check_length(layout: Layout, max_length: int) -> None:
    """Raises ValueError if a row is longer than `max_length`."""
    if layout.width is None and layout.longest > max_length:
        raise ValueError(
            f"a row has {layout.longest} items, the model's max_length is {max_length}: cut rows to it, or raise it"
        )
