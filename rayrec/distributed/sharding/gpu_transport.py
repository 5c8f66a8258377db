"""How ids get to other ranks' GPUs: headers on the host, a batch ahead, then one exchange of all parts on the device.

See `id_transport` for the way between CPUs, where both are one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed import comm
from rayrec.distributed.awaitable import Deferred
from rayrec.distributed.sharding.id_message import Ids, from_pieces, part_sizes, to_pieces
from rayrec.distributed.sharding.upload import OnHost


@dataclass(frozen=True)
class Parcel:
    """A batch's ids, ready to leave.

    Args:
        message: the words for rank 0, then for rank 1 …
        sent, received: headers of this rank for every rank, and of every rank for this one, `[W, columns]`.
    """

    message: torch.Tensor
    sent: OnHost[torch.Tensor]
    received: OnHost[torch.Tensor]


class GpuTransport:
    """The way of one collection's ids.

    Args:
        group: joins the ranks' GPUs.
        host_group: joins the same ranks on the host; no other thread uses it.
        rank: of this process.
        streams: how many streams each rank receives of every rank.
        weighted: ids carry weights.
    """

    def __init__(
        self, group: comm.Group, host_group: comm.Group, rank: int, streams: Sequence[int], weighted: bool
    ) -> None:
        self._group, self._host_group, self._weighted = group, host_group, weighted
        self._streams, self._own_streams = torch.tensor(streams), streams[rank]

    def exchange_headers(self, header_WH: torch.Tensor) -> torch.Tensor:
        """Every rank's header for this one; waits on the host."""
        return comm.exchange_on_hosts(header_WH, self._host_group)

    def pack(self, mine: Ids, sent: torch.Tensor, received: torch.Tensor) -> Parcel:
        """This rank's streams of rank 0, then of rank 1 …, as one message."""
        pieces = to_pieces(mine, part_sizes(sent, self._streams, self._weighted))
        return Parcel(torch.cat(pieces), OnHost(sent), OnHost(received))

    def start(self, parcel: Parcel) -> Deferred[Ids]:
        """Begins to exchange parts on the device; waits for those of all ranks."""
        sizes_in = part_sizes(parcel.received.item, self._own_streams, self._weighted)
        arrived, wait = parcel.message, None
        if len(self._streams) > 1 and bool(self._streams.any()):  # else there are only replicated tables
            splits_in = sizes_in.sum(1).tolist()
            splits_out = part_sizes(parcel.sent.item, self._streams, self._weighted).sum(1).tolist()
            arrived = parcel.message.new_empty(sum(splits_in))
            wait = comm.all_to_all(arrived, parcel.message, splits_in, splits_out, self._group)

        def finish() -> Ids:
            if wait is not None:
                wait()
            return from_pieces(arrived.split(sizes_in.view(-1).tolist()), self._weighted)

        return Deferred(finish)
