"""What ranks tell each other about ids: the columns of a header, and how what belongs to it lies in a message.

A header goes to every rank, and with it or behind it a part: ids (int64), lengths (int32), weights (float32) if there
are any. Messages are seen as words of 4 bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.comm.wire import ID_BYTES, LENGTH_BYTES, WEIGHT_BYTES

# columns of a header, before one count for each kernel group and one for each group of replicated tables
VALUES, BATCH, BAD, OVER, GROUPS = 0, 1, 2, 3, 4  # `part_sizes` reads the first two as they come
WORD = torch.int32
WORD_BYTES = WORD.itemsize
Headers = list[list[int]]  # by rank; a few numbers, for which operators on tensors would take longer


@dataclass(frozen=True)
class Ids:
    """Lists of ids, one after the other.

    Args:
        lengths: of each list, in any shape.
        values: `[N]`.
        weights: `[N]` or None.
    """

    lengths: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor | None = None


def part_sizes(headers: Headers, streams: Sequence[int], weighted: bool) -> list[list[int]]:
    """For each of W parts the words of its pieces.

    Args:
        headers: of all parts.
        streams: how many streams the receiver of each has.
        weighted: ids carry weights.
    """
    sizes = []
    for (count, batch, *_), num_streams in zip(headers, streams, strict=True):
        words = [count * (ID_BYTES // WORD_BYTES), batch * num_streams * (LENGTH_BYTES // WORD_BYTES)]
        sizes.append([*words, count * (WEIGHT_BYTES // WORD_BYTES)] if weighted else words)
    return sizes


def to_pieces(ids: Ids, sizes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """The words of all parts, piece after piece and part after part."""
    columns = [ids.values, ids.lengths.to(torch.int32)]
    columns += [] if ids.weights is None else [ids.weights.detach().to(torch.float32)]
    of_columns = zip(columns, zip(*sizes, strict=True), strict=True)
    pieces = [as_words(column).split(of_ranks) for column, of_ranks in of_columns]
    return [piece for part in zip(*pieces, strict=True) for piece in part]


def ids_from(pieces: Sequence[torch.Tensor], weighted: bool) -> Ids:
    """The ids of all parts, part after part, from what `to_pieces` gave."""
    columns = [pieces[number :: 2 + weighted] for number in range(2 + weighted)]
    words = [sum(piece.numel() for piece in column) for column in columns]
    values, lengths, *weights = torch.cat([piece for column in columns for piece in column]).split(words)
    return Ids(lengths, values.view(torch.int64), weights[0].view(torch.float32) if weighted else None)


def as_words(tensor: torch.Tensor, word: torch.dtype = WORD) -> torch.Tensor:
    """The tensor's memory, flat."""
    # As strided: an expanded tensor of one element is contiguous, and `view` still minds its stride of 0.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(word)
