"""The door to fbgemm's jagged-tensor operators. Shapes: F features (or segments), B examples, N values.

Weights may need gradients. fbgemm's own backward of a permutation is wrong where segments repeat or are left out (it
reads memory that is not its own), so such weights are moved by a gather along the places that the operator finds.
"""

from __future__ import annotations

from typing import Any

import fbgemm_gpu  # noqa: F401  (registers torch.ops.fbgemm)
import torch

_ops = torch.ops.fbgemm
MOST_NUMBERS = 2**31 - 1  # fbgemm's permutations count in 32 bits, and leave out what is beyond without a word


def complete_cumsum(lengths: torch.Tensor) -> torch.Tensor:
    """Offsets `[n + 1]` of lengths `[n]`, starting at 0, without a host synchronisation."""
    return _ops.asynchronous_complete_cumsum(lengths)


def as_words(tensor: torch.Tensor, word: torch.dtype) -> torch.Tensor:
    """The tensor's memory, flat."""
    # As strided: an expanded tensor of one element is contiguous, and `view` still checks its stride of 0.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(word)


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
    if weights is None or not weights.requires_grad or not torch.is_grad_enabled():
        return _permuted(order, lengths_FB, values, weights, num_values)
    lengths, moved, _ = _permuted(order, lengths_FB, values, None, num_values)
    places = _permuted(order, lengths_FB, _count(values), None, num_values)[1]
    return lengths, moved, weights[places]


def _permuted(
    order: torch.Tensor,
    lengths_FB: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    num_values: int | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    if values.is_cuda and lengths_FB.shape[1] > 1:
        return _ops.permute_2D_sparse_data(order, lengths_FB, values, weights, num_values)
    totals, lengths = lengths_FB.sum(1), lengths_FB.index_select(0, order)
    if values.is_cuda:
        moved_weights = None if weights is None else permute_chunks(order, totals, weights, num_values=num_values)
        return lengths, permute_chunks(order, totals, values, num_values=num_values), moved_weights
    # on a CPU whole rows move several times as fast as list after list
    _, moved, moved_weights = _ops.permute_1D_sparse_data(order, totals, values, weights, num_values)
    return lengths, moved, moved_weights


def permute_chunks(
    order: torch.Tensor, sizes: torch.Tensor, data: torch.Tensor, unit: int = 1, num_values: int | None = None
) -> torch.Tensor:
    """Chunks of `data` with the given `sizes` in another order (int32); chunks may repeat or be left out.

    Args:
        unit: divides every size; needed from 2³¹ numbers on.
        num_values: how many numbers the result has, where known (spares a synchronisation on a GPU).

    Raises:
        ValueError: there are 2³¹ units or more.
    """
    if (data.is_cuda and num_values is not None) or data.numel() > MOST_NUMBERS or _needs_gradient(data):
        if data.numel() // unit > MOST_NUMBERS:
            raise ValueError(f"{data.numel() // unit} ids are more than one exchange takes; use smaller batches")
        num_rows = None if num_values is None else num_values // unit
        rows = _chunk_rows(order, sizes if unit == 1 else sizes // unit, data.numel() // unit, num_rows)
        return data[rows] if unit == 1 else data.view(-1, unit).index_select(0, rows).view(-1)
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


def bucketize_rows(
    lengths: torch.Tensor,
    values: torch.Tensor,
    weights: torch.Tensor | None,
    block_sizes: torch.Tensor,
    num_buckets: int,
    edges: list[torch.Tensor] | None,
    with_positions: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Splits every feature's ids by the block of rows they fall in.

    Args:
        lengths: `[F * B]`, feature after feature.
        block_sizes: `[F]`, rows of a block, same dtype as `values`.
        num_buckets: K.
        edges: for unequal blocks, each feature's `K + 1` row edges; else None.
        with_positions: also return where each input value went.

    Returns:
        lengths `[K * F * B]` (bucket-major), ids counted from their block's first row, weights,
        and for each input value its position in the output (None unless `with_positions`).
    """
    gather = weights is not None and weights.requires_grad and torch.is_grad_enabled()
    new_lengths, new_values, new_weights, _, positions = _ops.block_bucketize_sparse_features(
        lengths,
        values,
        False,
        with_positions or gather,
        block_sizes,
        num_buckets,
        None if gather else weights,
        block_bucketize_pos=edges,
    )
    if gather and weights is not None:
        source = torch.empty_like(positions).index_copy_(
            0, positions.to(torch.int64), _count(values).to(positions.dtype)
        )
        new_weights = weights[source]
    return new_lengths, new_values, new_weights, positions if with_positions else None


def _needs_gradient(tensor: torch.Tensor | None) -> bool:
    return tensor is not None and tensor.requires_grad and torch.is_grad_enabled()


def _count(like: torch.Tensor) -> torch.Tensor:
    return torch.arange(like.shape[0], device=like.device)


def sparse_type(name: str) -> Any:
    """fbgemm's constant of a number format, by its name in capitals."""
    from fbgemm_gpu.split_embedding_configs import SparseType

    return getattr(SparseType, name)


def pooling_mode(name: str) -> Any:
    """fbgemm's constant of a pooling, by its name in capitals."""
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode

    return getattr(PoolingMode, name)
