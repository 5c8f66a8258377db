"""What an exchange of KeyedJaggedTensors between ranks sends, and the tensor made from what is received.

For users who write an exchange themselves; rayrec's collections exchange ids in another layout (`distributed/ids`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import torch

from rayrec.sparse import KeyedJaggedTensor, ops


def parts(kjt: KeyedJaggedTensor) -> dict[str, torch.Tensor]:
    """The tensors to send, by name; with varying batch sizes these too."""
    out = {"lengths": kjt.lengths(), "values": kjt.values()}
    weights = kjt.weights_or_none()
    if weights is not None:
        out["weights"] = weights
    if kjt.variable_stride_per_key():
        out["strides"] = torch.tensor(kjt.stride_per_key(), device=kjt.device())
    return out


def splits(kjt: KeyedJaggedTensor, key_splits: Sequence[int]) -> list[list[int]]:
    """For consecutive groups of keys, how much of each part belongs to each group."""
    edges = [0, *accumulate(key_splits)]
    rows, ids = kjt.lengths_offset_per_key(), kjt.offset_per_key()
    lengths = [rows[b] - rows[a] for a, b in pairwise(edges)]
    values = [ids[b] - ids[a] for a, b in pairwise(edges)]
    sizes = [lengths, values] if kjt.weights_or_none() is None else [lengths, values, values]
    return [*sizes, list(key_splits)] if kjt.variable_stride_per_key() else sizes


@dataclass(frozen=True)
class Received:
    """The parts of all ranks, rank after rank; `recat` is the order that puts them key after key."""

    keys: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    num_ranks: int
    recat: torch.Tensor | None
    stagger: int


def joined(received: Received, stride_per_rank: Sequence[int] | None) -> dict[str, Any]:
    """One batch of all ranks' examples. `recat` orders blocks of a rank's key, or single lists where ranks' batch
    sizes differ."""
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
    """One batch of all ranks' examples, of batch sizes that vary by key and rank."""
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


def dist_labels(kjt: KeyedJaggedTensor) -> list[str]:
    """Names of `dist_tensors`."""
    return list(parts(kjt))


def dist_tensors(kjt: KeyedJaggedTensor) -> list[torch.Tensor]:
    """The tensors that an exchange between ranks sends."""
    return list(parts(kjt).values())


def dist_init(
    keys: Sequence[str],
    tensors: Sequence[torch.Tensor],
    variable_stride_per_key: bool,
    num_workers: int,
    recat: torch.Tensor | None,
    stride_per_rank: Sequence[int] | None,
    stagger: int = 1,
) -> KeyedJaggedTensor:
    """From every rank's `dist_tensors`, rank after rank.

    Args:
        keys: of this rank.
        tensors: each of the parts, joined over ranks.
        variable_stride_per_key: the last part holds the batch sizes.
        num_workers: ranks.
        recat: int32, the order that puts rank-major parts key-major; None where they are in order.
        stride_per_rank: each rank's batch size, unless it varies by key.
        stagger: ranks come in strides of this many.
    """
    received = Received(tuple(keys), tuple(tensors), num_workers, recat, stagger)
    made = joined_varying(received) if variable_stride_per_key else joined(received, stride_per_rank)
    out = KeyedJaggedTensor(**made)
    out.offset_per_key()  # computed at once: later calls need it on the host
    return out
