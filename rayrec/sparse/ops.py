"""fbgemm's jagged-tensor operators. Shapes: F features (or segments), B examples, N values.

Weights may need gradients. fbgemm's backward of a permutation reads out of bounds if segments repeat or are left out.
Such weights are gathered by the positions that the operator finds.
"""

from __future__ import annotations

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import torch

_ops = torch.ops.fbgemm
MAX_ELEMENTS = 2**31 - 1  # fbgemm's permute operators use int32 counts and silently truncate


def complete_cumsum(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets `[n + 1]` of lengths `[n]`, starting at 0. Does not synchronize with the host."""
    return _ops.asynchronous_complete_cumsum(lengths)


def permute_segments(
    order: torch.Tensor,
    lengths_FB: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None = None,
    num_values: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Permutes the rows of a jagged `[F, B]`; rows may repeat or be left out.

    Args:
        order: int32 `[F']`, the source row of each result row.
        lengths_FB: lengths `[F, B]`.
        values, weights: `[N]`, row-major.
        num_values: number of values of the result, if known (saves a synchronization on a GPU).

    Returns:
        lengths `[F', B]`, values, weights.
    """
    if not order.numel():  # fbgemm's permute ops return their whole input for an empty order
        return lengths_FB[:0], values[:0], None if weights is None else weights[:0]
    if weights is not None and weights.requires_grad and torch.is_grad_enabled():
        lengths, moved, _ = permute_segments(order, lengths_FB, values, None, num_values)
        positions = torch.arange(values.shape[0], device=values.device)
        sources = permute_segments(order, lengths_FB, positions, None, num_values)[1]
        return lengths, moved, weights[sources]
    if values.is_cuda and lengths_FB.shape[1] > 1:
        return _ops.permute_2D_sparse_data(order, lengths_FB, values, weights, num_values)
    totals, lengths = lengths_FB.sum(1), lengths_FB.index_select(0, order)
    if values.is_cuda:
        moved_weights = None if weights is None else permute_chunks(order, totals, weights, num_values=num_values)
        return lengths, permute_chunks(order, totals, values, num_values=num_values), moved_weights
    # On a CPU, moving whole rows is several times faster than moving list by list.
    _, moved, moved_weights = _ops.permute_1D_sparse_data(order, totals, values, weights, num_values)
    return lengths, moved, moved_weights


def split_by_blocks(
    block_F: torch.Tensor, num_blocks: int, lengths_FB: torch.Tensor, values: torch.Tensor, weights: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Splits the values of each row f of a jagged `[F, B]` into `num_blocks` ranges of `block_F[f]` numbers each.

    Returns:
        lengths `[num_blocks * F, B]`, values relative to the start of their block, weights; block-major, then by row.
    """
    lengths, moved, moved_weights, *_ = _ops.block_bucketize_sparse_features(
        lengths_FB.reshape(-1), values, False, False, block_F, num_blocks, weights
    )
    return lengths.view(num_blocks * len(block_F), lengths_FB.shape[1]), moved, moved_weights


def permute_chunks(
    order: torch.Tensor, sizes: torch.Tensor, data: torch.Tensor, num_values: int | None = None
) -> torch.Tensor:
    """Permutes chunks of `data` with the given `sizes` by `order` (int32); chunks may repeat or be left out.

    Args:
        num_values: number of elements of the result, if known (saves a synchronization on a GPU).

    Raises:
        ValueError: `data` has 2³¹ elements or more.
    """
    if not order.numel():  # see permute_segments
        return data[:0]
    needs_grad = data.requires_grad and torch.is_grad_enabled()
    if data.numel() > MAX_ELEMENTS:
        raise ValueError(f"{data.numel()} ids are more than one exchange takes; use smaller batches")
    if needs_grad or (data.is_cuda and num_values is not None):
        return data[_chunk_sources(order, sizes, data.numel(), num_values)]
    return _ops.permute_1D_sparse_data(order, sizes, data, None, None)[1]


def _chunk_sources(order: torch.Tensor, sizes: torch.Tensor, num_rows: int, num_moved: int | None) -> torch.Tensor:
    """The source row of each result row."""
    if not order.is_cuda or num_moved is None:
        return _ops.permute_1D_sparse_data(order, sizes, torch.arange(num_rows, device=sizes.device), None, None)[1]
    # fbgemm's kernel assigns one thread block per chunk, and a batch has few chunks; here each row finds its chunk.
    moved = sizes.index_select(0, order).to(torch.int64)
    ends, starts = moved.cumsum(0), (sizes.cumsum(0, dtype=torch.int64) - sizes).index_select(0, order)
    rows = torch.arange(num_moved, device=sizes.device)
    chunk = torch.searchsorted(ends, rows, right=True)
    return rows + (starts - ends + moved).index_select(0, chunk)
