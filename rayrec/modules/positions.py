"""Where in its row, and when, an item stands: learned vectors for a position, learned biases for a pair of them."""

from __future__ import annotations

import torch
from torch import nn

from rayrec.modules.attention import Bucket, Layout

TIME_BUCKETS = 128
LOG_STEP = 0.301  # of natural logarithms of seconds, as in Meta's published form


class Positions(nn.Module):
    """A learned vector for each place of a row.

    Args:
        max_length: longer rows are an error; let the schema's `length` cut them.
        count_from: "newest": the last item has place 0, whatever the row's length; "oldest": the first has.
    """

    def __init__(self, max_length: int, dim: int, count_from: str = "newest") -> None:
        super().__init__()
        if count_from not in ("newest", "oldest"):
            raise ValueError(f"positions: count_from={count_from!r} must be 'newest' or 'oldest'")
        self.count_from = count_from
        self.vectors = nn.Parameter(torch.empty(max_length, dim))
        nn.init.normal_(self.vectors, std=0.02)

    def forward(self, layout: Layout) -> torch.Tensor:
        """`[T, D]`.

        Raises:
            ValueError: a row is longer than `max_length`.
        """
        check_length(layout, len(self.vectors))
        places = layout.place_of
        if self.count_from == "newest":
            places = layout.lengths[layout.row_of] - 1 - places
        return self.vectors.index_select(0, places)


class RelativeBias(nn.Module):
    """A bias for each pair of positions of a row: by their distance, and by the time between them.

    The time is that from item j to the item after i, which is when the prediction at i is asked for (Zhai et al. 2024,
    arXiv:2402.17152); see `Layout.next_times`.

    Args:
        max_length: N; rows may be as long.
        use_times: False where rows have no times.
    """

    def __init__(self, max_length: int, use_times: bool) -> None:
        super().__init__()
        self.max_length = max_length
        self.by_distance = nn.Parameter(torch.empty(2 * max_length - 1))
        self.by_time = nn.Parameter(torch.empty(TIME_BUCKETS + 1)) if use_times else None
        for weight in self.parameters():
            nn.init.normal_(weight, std=0.02)

    def forward(self, layout: Layout, bucket: Bucket) -> torch.Tensor:
        """`[b, width, width]`, or `[1, width, width]` without times: rows i, columns j.

        Raises:
            ValueError: the model uses times and the rows have none.
        """
        place = torch.arange(bucket.width, device=layout.device)
        bias_1NN = self.by_distance[place[None, :] - place[:, None] + self.max_length - 1][None]
        if self.by_time is None:
            return bias_1NN
        if layout.times is None or layout.next_times is None:
            raise ValueError(
                "the model uses times, but the sequence has none: give it a time column, or use_times: false"
            )
        gaps_BNN = bucket.pad(layout.next_times)[:, :, None] - bucket.pad(layout.times)[:, None, :]
        buckets = (gaps_BNN.abs().clamp(min=1).double().log() / LOG_STEP).long().clamp(max=TIME_BUCKETS)
        return bias_1NN + self.by_time[buckets]


def check_length(layout: Layout, most: int) -> None:
    """Raises ValueError where a row is longer than a model is made for."""
    if layout.width is None and layout.longest > most:
        raise ValueError(
            f"a row has {layout.longest} items, the model's max_length is {most}: cut rows to it, or raise it"
        )
