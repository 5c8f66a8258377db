"""Joins the tensors that all ranks sent into the fields of one KeyedJaggedTensor (see its `dist_init`).

For users who write an exchange themselves; rayrec's collections exchange ids in another layout (`distributed/ids`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rayrec.sparse import ops


@dataclass(frozen=True)
class Received:
    """The tensors of all ranks, rank-major; `recat` is the permutation to key-major."""

    keys: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    num_ranks: int
    recat: torch.Tensor | None
    stagger: int


def joined(received: Received, stride_per_rank: Sequence[int] | None) -> dict[str, Any]:
    """The examples of all ranks as one batch.

    `recat` permutes (rank, key) blocks, or single lists if the batch sizes of ranks differ.
    """
    lengths, values, *rest = received.tensors
    weights = rest[0] if rest else None
    sizes = list(stride_per_rank or [])
    if received.recat is not None and received.recat.numel():
        blocks = len(received.keys) * received.num_ranks
        width = lengths.numel() // blocks if len(set(sizes)) <= 1 else 1
        lengths, values, weights = ops.permute_segments(received.recat, lengths.view(-1, width), values, weights)
    stride = sum(sizes) if sizes else lengths.numel() // max(1, len(received.keys))
    return {"keys": received.keys, "values": values, "weights": weights, "lengths": lengths.view(-1), "stride": stride}


def joined_varying(received: Received) -> dict[str, Any]:
    """The examples of all ranks as one batch; batch sizes vary by key and rank."""
    lengths, values, *rest = received.tensors
    weights, strides = (rest[0] if len(rest) > 1 else None), rest[-1]
    by_rank = strides.view(received.num_ranks, len(received.keys))
    if received.recat is not None and received.recat.numel():
        bounds = ops.complete_cumsum(lengths)[ops.complete_cumsum(strides)]
        counts = (bounds[1:] - bounds[:-1]).to(lengths.dtype)
        values = ops.permute_chunks(received.recat, counts, values)
        weights = None if weights is None else ops.permute_chunks(received.recat, counts, weights)
        lengths = ops.permute_chunks(received.recat, strides.to(lengths.dtype), lengths)
    if received.stagger > 1:
        local = received.num_ranks // received.stagger
        by_rank = by_rank.view(received.stagger, local, -1).transpose(0, 1).reshape(by_rank.shape)
    return {
        "keys": received.keys,
        "values": values,
        "weights": weights,
        "lengths": lengths,
        "stride_per_key_per_rank": by_rank.t().tolist(),
    }
