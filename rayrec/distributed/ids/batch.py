"""The records of a batch on its way to the ranks that hold its rows, in the order in which they are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rayrec.distributed.ids.upload import OnHost
from rayrec.distributed.kernel.local_table import Lookups
from rayrec.sparse import KeyedJaggedTensor

# Columns of a header. One count for each kernel group and for each group of replicated tables follows.
VALUES, BATCH, FAILED, NUMBER, COLLECTION, GROUPS = 0, 1, 2, 3, 4, 5
WORD = torch.int32
WORD_BYTES = WORD.itemsize
Headers = list[list[int]]  # one row per rank
WordCounts = list[list[int]]  # per rank, the words of each column of its part of a message


@dataclass(frozen=True)
class Ids:
    """Lists of ids, concatenated.

    Args:
        lengths: length of each list, in any shape.
        values: `[N]`.
        weights: `[N]` or None.
    """

    lengths: torch.Tensor
    values: torch.Tensor
    weights: torch.Tensor | None = None


@dataclass(frozen=True)
class OutgoingIds:
    """The ids that a rank sends: all streams for rank 0, then all streams for rank 1, and so on.

    Args:
        ids: lengths `[S, B]`; None if the device splits the ids.
        header: int64, one row per rank.
        error: why this rank cannot process the batch; every rank then raises.
        lengths_FB: lengths of the features before the split, if traced.
        origins: position of each sent id among the features' ids, if traced.
        num_ids, num_cut: number of ids in all streams, and of ids before the split in the variants that are cut, if the
            device splits the ids.
    """

    ids: Ids | None
    header: torch.Tensor
    error: Exception | None = None
    lengths_FB: torch.Tensor | None = None
    origins: torch.Tensor | None = None
    num_ids: int = 0
    num_cut: int = 0


@dataclass(frozen=True)
class Kept:
    """Data of a batch that stays on its rank until its vectors come back: of each executor, and of the collection."""

    sharded: Any = None
    replicated: Any = None
    collection: Any = None


@dataclass(frozen=True)
class HostIds:
    """A batch routed on the host, ready to be sent.

    Between CPUs headers travel with the ids, and all fields after `kept` are None. On GPUs, after a failure of a rank,
    all fields after `received` are None.

    Args:
        outgoing: the ids and the header of each rank.
        kept: data that stays on this rank.
        received: every rank's header for this rank.
        word_counts: sizes of the parts for each rank, and of the parts from each rank.
        words: the message; None if the device splits the ids.
        weights: weights in the order sent, if they need gradients.
        chunks: see `IdReceiver.chunks`.
        units: see `RankIds`.
    """

    outgoing: OnHost[OutgoingIds]
    kept: Kept
    received: OnHost[Headers] | None = None
    word_counts: OnHost[tuple[WordCounts, WordCounts]] | None = None
    words: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    chunks: torch.Tensor | None = None
    units: torch.Tensor | None = None


@dataclass(frozen=True)
class SentIds:
    """A batch being exchanged.

    Args:
        batch: the batch that was sent.
        wait: waits for the exchange, and on CPUs returns each rank's message; None if nothing is exchanged.
        arrived: a GPU's receive buffer.
        words: a GPU's send buffer.
        features: the batch on a GPU.
    """

    batch: HostIds
    wait: Callable[[], Any] | None = None
    arrived: torch.Tensor | None = None
    words: torch.Tensor | None = None
    features: KeyedJaggedTensor | None = None


@dataclass(frozen=True)
class RankIds:
    """The ids that this rank looks up for all ranks.

    Args:
        lookups: for each kernel group of this rank, the ids of its lookups over the global batch.
        sent, received: this rank's headers for every rank, and every rank's headers for this rank.
        batch_sizes: examples of each rank.
        counts: for each rank, its number of distinct rows in each group of replicated tables.
        kept: data of this rank's own batch.
        weights: all received weights if they need gradients; backward must reach them on every rank.
        units: position in the result of each unit of the vectors that come back (see `SequenceOrder`); None if they
            come in order.
        features: this rank's own batch on a GPU.
    """

    lookups: Mapping[int, Lookups]
    sent: Headers
    received: Headers
    batch_sizes: list[int]
    counts: list[list[int]]
    kept: Kept
    weights: torch.Tensor | None
    units: torch.Tensor | None
    features: KeyedJaggedTensor | None
