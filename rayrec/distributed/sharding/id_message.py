"""What ranks tell each other about ids: the columns of a header, and the message that follows it.

A message carries lengths (int32), ids (int64) and weights (float32) in one piece, each part padded to 8 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rayrec.distributed import comm

# columns of a header, before one count for each kernel group and one for each group of replicated tables
VALUES, BATCH, BAD, GROUPS = 0, 1, 2, 3
ID_BYTES, LENGTH_BYTES, WEIGHT_BYTES = 8, 4, 4


@dataclass(frozen=True)
class Part:
    """What one rank sent: lengths `[S, B]` of its examples in this rank's streams."""

    lengths_SB: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor | None


def swap(
    group: comm.Group,
    mine: Part,
    sent: Sequence[Sequence[int]],
    received: Sequence[Sequence[int]],
    streams: Sequence[int],
    rank: int,
) -> list[Part]:
    """Every rank's part for this rank, by one exchange.

    Args:
        mine: this rank's streams of rank 0, then of rank 1 …
        sent, received: this rank's headers, one a rank.
        streams: how many streams each rank receives of every rank.
    """
    message, splits = _pack(mine, [header[VALUES] for header in sent], streams)
    weighted = mine.weights is not None
    sizes = [_num_bytes(streams[rank] * header[BATCH], header[VALUES], weighted) for header in received]
    arrived = message.new_empty(sum(sizes))
    comm.all_to_all(arrived, message, sizes, splits, group)()
    starts = [0, *accumulate(sizes)]
    return [
        _unpack(arrived[start:], streams[rank], header[BATCH], header[VALUES], weighted)
        for start, header in zip(starts, received, strict=False)
    ]


def _pack(mine: Part, counts: Sequence[int], streams: Sequence[int]) -> tuple[torch.Tensor, list[int]]:
    """The message to all ranks, and how many bytes of it go to each."""
    lengths, values = _bytes(mine.lengths_SB.to(torch.int32)), _bytes(mine.values)
    weights = None if mine.weights is None else _bytes(mine.weights.to(torch.float32))
    batch, padding = mine.lengths_SB.shape[1], lengths.new_zeros(8)
    pieces, splits, row, value = [], [], 0, 0
    for num_streams, count in zip(streams, counts, strict=True):
        next_row, next_value = row + num_streams * batch, value + count
        parts = [lengths[LENGTH_BYTES * row : LENGTH_BYTES * next_row]]
        parts.append(values[ID_BYTES * value : ID_BYTES * next_value])
        if weights is not None:
            parts.append(weights[WEIGHT_BYTES * value : WEIGHT_BYTES * next_value])
        for part in parts:
            pieces += [part, padding[: _aligned(part.numel()) - part.numel()]]
        splits.append(_num_bytes(num_streams * batch, count, weights is not None))
        row, value = next_row, next_value
    return torch.cat(pieces), splits


def _unpack(message: torch.Tensor, num_streams: int, batch: int, count: int, weighted: bool) -> Part:
    num_lengths = num_streams * batch
    at = _aligned(LENGTH_BYTES * num_lengths)
    lengths = message[: LENGTH_BYTES * num_lengths].view(torch.int32).view(num_streams, batch)
    values = message[at : at + ID_BYTES * count].view(torch.int64)
    at += ID_BYTES * count
    weights = message[at : at + WEIGHT_BYTES * count].view(torch.float32) if weighted else None
    return Part(lengths, values, weights)


def _num_bytes(num_lengths: int, count: int, weighted: bool) -> int:
    weights = _aligned(WEIGHT_BYTES * count) if weighted else 0
    return _aligned(LENGTH_BYTES * num_lengths) + ID_BYTES * count + weights


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // 8) * 8
