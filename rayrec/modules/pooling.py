"""Pooling of jagged rows to one vector each. Shapes: T positions of all rows together, B rows, D width."""

from __future__ import annotations

import torch


def row_of(lengths_B: torch.Tensor, total: int | None) -> torch.Tensor:
    """The row of each position: `[T]`. Waits for the device unless `total`, which is T, is given."""
    rows = torch.arange(lengths_B.shape[0], device=lengths_B.device)
    return torch.repeat_interleave(rows, lengths_B, output_size=total)


def pool_sum(values_TD: torch.Tensor, lengths_B: torch.Tensor, weights_T: torch.Tensor | None = None) -> torch.Tensor:
    """Sums of each row's vectors, times their weights if given: `[B, D]`. An empty row gives 0."""
    if weights_T is not None:
        values_TD = values_TD * weights_T[:, None]
    sums_BD = values_TD.new_zeros(lengths_B.shape[0], values_TD.shape[1])
    return sums_BD.index_add(0, row_of(lengths_B, values_TD.shape[0]), values_TD)


def pool_mean(values_TD: torch.Tensor, lengths_B: torch.Tensor, weights_T: torch.Tensor | None = None) -> torch.Tensor:
    """`pool_sum` divided by the number of positions: `[B, D]`."""
    return pool_sum(values_TD, lengths_B, weights_T) / lengths_B.clamp(min=1)[:, None]


def jagged_softmax(scores_T: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Softmax within each row: `[T]`."""
    rows = row_of(lengths_B, scores_T.shape[0])
    highest_B = scores_T.detach().new_full((lengths_B.shape[0],), -torch.inf)
    highest_B = highest_B.scatter_reduce(0, rows, scores_T.detach(), "amax")
    exps_T = (scores_T - highest_B[rows]).exp()
    sums_B = exps_T.new_zeros(lengths_B.shape[0]).index_add(0, rows, exps_T)
    return exps_T / sums_B[rows]
