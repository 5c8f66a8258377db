"""How ids get to other ranks' GPUs: headers on the host, a batch ahead, then one exchange of all parts on the device.

See `id_transport` for the way between CPUs, where both are one message.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed import comm
from rayrec.distributed.sharding.id_message import BATCH, VALUES, Part, from_bytes, num_bytes, to_bytes
from rayrec.distributed.sharding.id_transport import Headers


@dataclass(frozen=True)
class Parcel:
    """A batch's ids, ready to leave.

    Args:
        message: uint8, the bytes for rank 0, then for rank 1 …; None where some rank cannot go on.
        sent, received: headers of this rank for every rank, and of every rank for this one.
    """

    message: torch.Tensor | None
    sent: Headers
    received: Headers


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
        self._group, self._host_group, self._rank = group, host_group, rank
        self._streams, self._weighted = list(streams), weighted

    def exchange_headers(self, header_WH: torch.Tensor) -> tuple[Headers, Headers]:
        """Those of this rank for every rank, and those of every rank for this one; waits on the host."""
        received = torch.empty_like(header_WH)
        comm.all_to_all(received, header_WH, None, None, self._host_group)()
        return header_WH.tolist(), received.tolist()

    def message(self, mine: Part, sent: Headers) -> torch.Tensor:
        """The bytes of all parts."""
        pieces = to_bytes(mine, [header[VALUES] for header in sent], self._streams)
        return torch.cat([piece for of_rank in pieces for piece in of_rank])

    def start(self, parcel: Parcel) -> GpuDelivery:
        """Begins to exchange parts on the device."""
        assert parcel.message is not None
        own = self._streams[self._rank]
        splits_out = [self._num_bytes(*pair) for pair in zip(parcel.sent, self._streams, strict=True)]
        splits_in = [self._num_bytes(header, own) for header in parcel.received]
        if len(self._streams) == 1:
            return GpuDelivery(parcel.message, _nothing, splits_in, parcel.received, (own, self._weighted))
        arrived = parcel.message.new_empty(sum(splits_in))
        wait = comm.all_to_all(arrived, parcel.message, splits_in, splits_out, self._group)
        return GpuDelivery(arrived, wait, splits_in, parcel.received, (own, self._weighted))

    def _num_bytes(self, header: Sequence[int], streams: int) -> int:
        return num_bytes(streams * header[BATCH], header[VALUES], self._weighted)


@dataclass(frozen=True)
class GpuDelivery:
    """One batch on its way."""

    arrived: torch.Tensor
    wait: comm.Wait
    splits: list[int]  # bytes of each rank's part
    received: Headers
    form: tuple[int, bool]  # streams of each part, and whether it is weighted

    def parts(self) -> list[Part]:
        """Every rank's part for this rank."""
        self.wait()
        streams, weighted = self.form
        return [
            from_bytes(piece, streams, header[BATCH], header[VALUES], weighted)
            for piece, header in zip(self.arrived.split(self.splits), self.received, strict=True)
        ]


def _nothing() -> None:
    return None
