"""The door to fbgemm's jagged-tensor operators. Shapes: F features (or segments), B examples, N values.

Weights may need gradients. fbgemm's own backward of a permutation is wrong where segments repeat or are left out (it
reads memory that is not its own), so such weights are moved by a gather along the places that the operator finds.
"""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import torch

_ops = torch.ops.fbgemm
MOST_NUMBERS = 2**31 - 1  # fbgemm's permutations count in 32 bits, and leave out what is beyond without a word


def complete_cumsum(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets `[n + 1]` of lengths `[n]`, starting at 0, without a host synchronisation."""
    return _ops.asynchronous_complete_cumsum(lengths)


def permute_segments(
    order: torch.Tensor,
    lengths_FB: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None = None,
    num_values: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Rows of a jagged `[F, B]` in another order; rows may repeat or be left out.

    Args:
        order: int32 `[F']`, the row that comes at each place.
        lengths_FB: lengths `[F, B]`.
        values, weights: `[N]`, row after row.
        num_values: how many values the result has, where known (spares a synchronisation on a GPU).

    Returns:
        lengths `[F', B]`, values, weights.
    """
    if weights is not None and weights.requires_grad and torch.is_grad_enabled():
        lengths, moved, _ = permute_segments(order, lengths_FB, values, None, num_values)
        places = permute_segments(order, lengths_FB, _count(values), None, num_values)[1]
        return lengths, moved, weights[places]
    if values.is_cuda and lengths_FB.shape[1] > 1:
        return _ops.permute_2D_sparse_data(order, lengths_FB, values, weights, num_values)
    totals, lengths = lengths_FB.sum(1), lengths_FB.index_select(0, order)
    if values.is_cuda:
        moved_weights = None if weights is None else permute_chunks(order, totals, weights, num_values=num_values)
        return lengths, permute_chunks(order, totals, values, num_values=num_values), moved_weights
    # on a CPU whole rows move several times as fast as list after list
    _, moved, moved_weights = _ops.permute_1D_sparse_data(order, totals, values, weights, num_values)
    return lengths, moved, moved_weights


def split_by_blocks(
    block_F: torch.Tensor, num_blocks: int, lengths_FB: torch.Tensor, values: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The values of each row of a jagged `[F, B]` in `num_blocks` blocks of `block_F[f]` numbers each.

    Returns:
        lengths `[num_blocks * F, B]`, values counted from the first number of their block, weights; in the order of
        blocks, then of rows.
    """
    given = (lengths_FB.reshape(-1), values, False, False, block_F, num_blocks, weights)
    lengths, moved, moved_weights, *_ = _ops.block_bucketize_sparse_features(*given)
    return lengths.view(num_blocks * len(block_F), lengths_FB.shape[1]), moved, moved_weights


def permute_chunks(
    order: torch.Tensor, sizes: torch.Tensor, data: torch.Tensor, num_values: int | None = None
) -> torch.Tensor:
    """Chunks of `data` with the given `sizes` in another order (int32); chunks may repeat or be left out.

    Args:
        num_values: how many numbers the result has, where known (spares a synchronisation on a GPU).

    Raises:
        ValueError: there are 2³¹ numbers or more.
    """
    trained = data.requires_grad and torch.is_grad_enabled()
    if data.numel() > MOST_NUMBERS:
        raise ValueError(f"{data.numel()} ids are more than one exchange takes; use smaller batches")
    if trained or (data.is_cuda and num_values is not None):
        return data[_chunk_rows(order, sizes, data.numel(), num_values)]
    return _ops.permute_1D_sparse_data(order, sizes, data, None, None)[1]


def _chunk_rows(order: torch.Tensor, sizes: torch.Tensor, num_rows: int, num_moved: int | None) -> torch.Tensor:
    """For each place of the result the row that it is taken from."""
    if not order.is_cuda or num_moved is None:
        return _ops.permute_1D_sparse_data(order, sizes, torch.arange(num_rows, device=sizes.device), None, None)[1]
    # fbgemm's kernel gives a chunk to a block, and a batch has few chunks; here every row finds its chunk by itself
    moved = sizes.index_select(0, order).to(torch.int64)
    ends, starts = moved.cumsum(0), (sizes.cumsum(0, dtype=torch.int64) - sizes).index_select(0, order)
    places = torch.arange(num_moved, device=sizes.device)
    chunk = torch.searchsorted(ends, places, right=True)
    return places + (starts - ends + moved).index_select(0, chunk)


def _count(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.shape[0], device=like.device)
