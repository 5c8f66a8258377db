"""How ids get to other ranks' GPUs: headers on the host, a batch ahead, then one exchange of all parts on the device.

See `id_transport` for the way between CPUs, where both are one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.awaitable import Deferred
from rayrec.distributed.ids.message import Headers, Ids, ids_from, part_sizes, to_pieces
from rayrec.distributed.ids.upload import OnHost


@dataclass(frozen=True)
class Parcel:
    """A batch's ids, ready to leave.

    Args:
        message: the words for rank 0, then for rank 1 …
        leave, come: words for each rank, and from each.
        pieces: words of each piece of what comes.
        received: every rank's header for this one.
    """

    message: torch.Tensor
    leave: list[int]
    come: list[int]
    pieces: list[int]
    received: OnHost[Headers]


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
        self._streams, self._own_streams = list(streams), [streams[rank]] * len(streams)

    def exchange_headers(self, header_WH: torch.Tensor) -> Headers:
        """Every rank's header for this one; waits on the host."""
        return comm.exchange_on_hosts(header_WH, self._host_group).tolist()

    def pack(self, mine: Ids, sent: Headers, received: Headers) -> Parcel:
        """This rank's streams of rank 0, then of rank 1 …, as one message.

        Args:
            sent, received: headers of this rank for every rank, and of every rank for this one.
        """
        leave = part_sizes(sent, self._streams, self._weighted)
        come = part_sizes(received, self._own_streams, self._weighted)
        pieces = [size for of_part in come for size in of_part]
        message = torch.cat(to_pieces(mine, leave))
        return Parcel(message, list(map(sum, leave)), list(map(sum, come)), pieces, OnHost(received))

    def start(self, parcel: Parcel) -> Deferred[Ids]:
        """Begins to exchange parts on the device; waits for those of all ranks."""
        arrived, wait = parcel.message, None
        if len(self._streams) > 1 and any(self._streams):  # else there are only replicated tables
            arrived = parcel.message.new_empty(sum(parcel.come))
            wait = comm.all_to_all(arrived, parcel.message, parcel.come, parcel.leave, self._group)

        def finish() -> Ids:
            if wait is not None:
                wait()
            return ids_from(arrived.split(parcel.pieces), self._weighted)

        return Deferred(finish)
