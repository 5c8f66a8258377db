"""A batch at each stage of its way to the ranks that hold its rows. Facts only."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from rayrec.distributed.ids.upload import OnHost
from rayrec.distributed.kernel import Lookups

# Columns of a header; one count for each kernel group and for each group of replicated tables follows.
VALUES, BATCH, FAILED, NUMBER, GROUPS = 0, 1, 2, 3, 4
WORD = torch.int32
WORD_BYTES = WORD.itemsize
Headers = list[list[int]]  # a row for each rank


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


@dataclass(frozen=True)
class Trace:
    """Where split ids come from.

    Args:
        lengths_FB: lengths of the features before they were split.
        origins: for each id its place among the features' ids.
    """

    lengths_FB: torch.Tensor
    origins: torch.Tensor


@dataclass(frozen=True)
class Split:
    """A batch's ids, stream after stream.

    Args:
        ids: lengths `[S, B]`.
        totals: how many ids each stream has, int64 `[S]`.
        trace: None unless it is wanted.
    """

    ids: Ids
    totals: torch.Tensor
    trace: Trace | None


@dataclass(frozen=True)
class Counts:
    """What the host knows of a batch that a GPU splits.

    Args:
        totals: ids of each stream, int64 `[S]`.
        num_cut: ids of the variants that are cut, together.
    """

    totals: torch.Tensor
    num_cut: int


@dataclass(frozen=True)
class OutgoingIds:
    """A batch in the order in which ranks receive it.

    Args:
        ids: streams of rank 0, then of rank 1 and so on, lengths `[streams, B]`; None where the device splits them.
        header: int64, a row for each rank.
        error: why this rank cannot go on with the batch; every rank then raises.
        trace: of `ids`, if it is wanted.
        counted: of these ids, where the device splits them; else None.
    """

    ids: Ids | None
    header: torch.Tensor
    error: Exception | None = None
    trace: Trace | None = None
    counted: Counts | None = None


@dataclass(frozen=True)
class Kept:
    """What a batch leaves on its own rank, for the stages that finish its vectors.

    Args:
        sharded, replicated: of each executor.
        collection: of the collection.
        weights: in the order sent, if they need gradients; else None.
    """

    sharded: Any = None
    replicated: Any = None
    collection: Any = None
    weights: torch.Tensor | None = None


@dataclass(frozen=True)
class DeviceMessage:
    """What leaves for other GPUs.

    Args:
        words: for rank 0, then for rank 1 and so on; None where the device splits the ids.
        leave: words of each column of each rank's part.
        received: words from each rank.
        pieces: words of each piece of what is received.
    """

    words: torch.Tensor | None
    leave: list[list[int]]
    received: list[int]
    pieces: list[int]


@dataclass(frozen=True)
class Arrival:
    """Where what a GPU receives belongs.

    Args:
        chunks: examples of each stream of each rank (see `IdReceiver.chunks`).
        units: of the vectors that come back (see `PlaceFinder`).
    """

    chunks: torch.Tensor | None
    units: torch.Tensor | None


@dataclass(frozen=True)
class HostIds:
    """A batch routed on the host, ready to be sent.

    Args:
        outgoing: in the order in which ranks receive it.
        kept: what stays on this rank.
        received, message, arrival: for GPUs, every rank's header for this one, what leaves, and where what arrives
            belongs; None between CPUs, where headers travel with the ids.
    """

    outgoing: OnHost[OutgoingIds]
    kept: Kept
    received: OnHost[Headers] | None = None
    message: DeviceMessage | None = None
    arrival: Arrival | None = None


@dataclass(frozen=True)
class SentIds:
    """A batch under way.

    Args:
        batch: what was sent.
        wait: waits for what arrives, and on CPUs returns each rank's message; None if nothing does.
        arrived: where a GPU receives parts.
    """

    batch: HostIds
    wait: Callable[[], Any] | None = None
    arrived: torch.Tensor | None = None


@dataclass(frozen=True)
class BatchHeaders:
    """What ranks know of each other's batch.

    Args:
        sent, received: headers of this rank for every rank, and of every rank for this one.
        batch_sizes: examples of each rank, in rank order.
        counts: for each rank, the counts of its header.
    """

    sent: Headers
    received: Headers
    batch_sizes: list[int]
    counts: list[list[int]]


@dataclass(frozen=True)
class RankIds:
    """What this rank looks up for all ranks.

    Args:
        lookups: for each kernel group that this rank has, the ids of its lookups over the global batch.
        headers: of the batch.
        kept: what the batch left on this rank.
        weights: all received weights if they need gradients; backward must reach them on every rank.
        units: where vectors that come back belong (see `PlaceFinder`); None if they come in order.
    """

    lookups: Mapping[int, Lookups]
    headers: BatchHeaders
    kept: Kept
    weights: torch.Tensor | None
    units: torch.Tensor | None
