"""What ranks tell each other about ids: the columns of a header, and the bytes of what belongs to it.

A part holds lengths (int32), ids (int64) and weights (float32) in one piece, each padded to 8 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.wire import ID_BYTES, LENGTH_BYTES, WEIGHT_BYTES

# columns of a header, before one count for each kernel group and one for each group of replicated tables
VALUES, BATCH, BAD, OVER, GROUPS = 0, 1, 2, 3, 4
ALIGNMENT = 8


@dataclass(frozen=True)
class Part:
    """What one rank sent: lengths `[S, B]` of its examples in this rank's streams."""

    lengths_SB: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor | None


def to_bytes(mine: Part, counts: Sequence[int], streams: Sequence[int]) -> list[list[torch.Tensor]]:
    """For each rank the pieces of its bytes, one after the other.

    Args:
        mine: this rank's streams of rank 0, then of rank 1 …
        counts: ids for each rank.
        streams: how many streams each rank receives.
    """
    batch = mine.lengths_SB.shape[1]
    lengths = as_bytes(mine.lengths_SB.to(torch.int32))
    columns = [lengths.split([LENGTH_BYTES * num * batch for num in streams])]
    columns.append(as_bytes(mine.values).split([ID_BYTES * count for count in counts]))
    if mine.weights is not None:
        weights = as_bytes(mine.weights.detach().to(torch.float32))
        columns.append(weights.split([WEIGHT_BYTES * count for count in counts]))
    padding = lengths.new_zeros(ALIGNMENT)
    pieces: list[list[torch.Tensor]] = []
    for of_rank in zip(*columns, strict=True):
        pieces.append([])
        for piece in of_rank:
            pieces[-1].append(piece)
            if missing := -piece.numel() % ALIGNMENT:
                pieces[-1].append(padding[:missing])
    return pieces


def from_bytes(message: torch.Tensor, num_streams: int, batch: int, count: int, weighted: bool) -> Part:
    """The part that begins where `message` does."""
    num_lengths = num_streams * batch
    at = _aligned(LENGTH_BYTES * num_lengths)
    lengths = message[: LENGTH_BYTES * num_lengths].view(torch.int32).view(num_streams, batch)
    values = message[at : at + ID_BYTES * count].view(torch.int64)
    at += ID_BYTES * count
    weights = message[at : at + WEIGHT_BYTES * count].view(torch.float32) if weighted else None
    return Part(lengths, values, weights)


def num_bytes(num_lengths: int, count: int, weighted: bool) -> int:
    """Bytes of a part."""
    weights = _aligned(WEIGHT_BYTES * count) if weighted else 0
    return _aligned(LENGTH_BYTES * num_lengths) + ID_BYTES * count + weights


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory, flat."""
    return tensor.contiguous().view(-1).view(torch.uint8)


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
