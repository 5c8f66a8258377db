"""How headers and parts get from rank to rank: by one exchange where parts fit the room that is foreseen, else by two.

Each pair of ranks has a room: bytes that travel with the header, filled or not. Both ends derive it from the headers of
earlier batches, so that nobody has to be told how much will come. A part that does not fit is left out, every header
of its rank says so, and all ranks meet for a second exchange.

For GPUs headers are exchanged on the host, a batch ahead (`GpuTransport`): when ids leave, every size is known.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.distributed import comm
from rayrec.distributed.sharding.buffers import BufferPool
from rayrec.distributed.sharding.id_message import (
    ALIGNMENT,
    BATCH,
    OVER,
    VALUES,
    Part,
    as_bytes,
    from_bytes,
    num_bytes,
    to_bytes,
)

Headers = list[list[int]]  # one row a rank
LEAST_SLACK, MOST_SLACK = 256, 1 << 16  # bytes
HEADER_BYTES = 8  # a column


class IdTransport:
    """The way of one collection's ids.

    Args:
        group: joins the ranks.
        rank: of this process.
        streams: how many streams each rank receives of every rank.
        weighted: ids carry weights.
    """

    def __init__(self, group: comm.Group, rank: int, streams: Sequence[int], weighted: bool) -> None:
        self.group, self.rank, self.weighted = group, rank, weighted
        self.streams = list(streams)
        self.buffers = BufferPool(torch.device("cpu"))
        self.rooms_out, self.rooms_in = [0] * len(streams), [0] * len(streams)  # bytes, by rank

    def start(self, header_WH: torch.Tensor, mine: Part) -> Delivery:
        """Begins to send.

        Args:
            header_WH: int64, a row for each rank.
            mine: this rank's streams of rank 0, then of rank 1 …
        """
        return Delivery(self, header_WH, mine)

    def sizes_out(self, sent: Headers) -> list[int]:
        """Bytes of the part for each rank."""
        pairs = zip(sent, self.streams, strict=True)
        return [num_bytes(streams * header[BATCH], header[VALUES], self.weighted) for header, streams in pairs]

    def sizes_in(self, received: Headers) -> list[int]:
        """Bytes of the part of each rank."""
        streams = self.streams[self.rank]
        return [num_bytes(streams * header[BATCH], header[VALUES], self.weighted) for header in received]

    def learn(self, sizes_out: Sequence[int], sizes_in: Sequence[int]) -> None:
        """Makes room for parts like these. Every rank learns from the same exchanges in the same order."""
        self.rooms_out = [_room(*pair) for pair in zip(self.rooms_out, sizes_out, strict=True)]
        self.rooms_in = [_room(*pair) for pair in zip(self.rooms_in, sizes_in, strict=True)]


def _room(room: int, size: int) -> int:
    """A little more than was needed, and shrinking slowly: a few small batches between others cost nothing."""
    wanted = size + min(max(size // 8, LEAST_SLACK), MOST_SLACK) if size else 0
    return max(wanted, room - room // 64) // ALIGNMENT * ALIGNMENT


class Delivery:
    """One batch on its way: `headers` first, then `parts`."""

    def __init__(self, transport: IdTransport, header_WH: torch.Tensor, mine: Part) -> None:
        self._transport, self._header_WH, self._mine = transport, header_WH, mine
        self._rooms_out, self._rooms_in = transport.rooms_out, transport.rooms_in
        self._header_width = HEADER_BYTES * header_WH.shape[1]
        self._received: Headers = []
        self._sent: Headers = header_WH.tolist()
        self._sizes_out = transport.sizes_out(self._sent)
        if any(size > room for size, room in zip(self._sizes_out, self._rooms_out, strict=True)):
            header_WH[:, OVER] = 1
        splits_out = [self._header_width + room for room in self._rooms_out]
        self._splits_in = [self._header_width + room for room in self._rooms_in]
        self._arrived = transport.buffers.empty(sum(self._splits_in), torch.uint8)
        self._wait = comm.all_to_all(self._arrived, self._first(), self._splits_in, splits_out, transport.group)

    def _pieces(self) -> list[list[torch.Tensor]]:
        return to_bytes(self._mine, [header[VALUES] for header in self._sent], self._transport.streams)

    def _first(self) -> torch.Tensor:
        """Headers, each with its room behind it, filled where the part fits."""
        if not any(self._rooms_out):
            return as_bytes(self._header_WH)
        message: list[torch.Tensor] = []
        of_ranks = zip(self._header_WH.unbind(), self._pieces(), self._rooms_out, self._sizes_out, strict=True)
        for header, pieces, room, size in of_ranks:
            filled = size if size <= room else 0
            message += [as_bytes(header), *(pieces if filled else ())]
            message.append(self._transport.buffers.empty(room - filled, torch.uint8))
        return self._joined(message)

    def headers(self) -> tuple[Headers, Headers]:
        """This rank's headers for every rank, and every rank's for this one."""
        self._wait()
        received = torch.cat([early[: self._header_width] for early in self._arrived.split(self._splits_in)])
        self._received = received.view(torch.int64).view(len(self._splits_in), -1).tolist()
        return self._sent, self._received

    def parts(self) -> list[Part]:
        """Every rank's part for this rank, once headers are there."""
        transport = self._transport
        sizes_in = transport.sizes_in(self._received)
        left_out = [size if size > room else 0 for size, room in zip(sizes_in, self._rooms_in, strict=True)]
        again = any(header[OVER] for header in self._received)
        bodies = [early[self._header_width :] for early in self._arrived.split(self._splits_in)]
        if again:
            late = zip(left_out, self._second(left_out), bodies, strict=True)
            bodies = [second if size else first for size, second, first in late]
        transport.learn(self._sizes_out, sizes_in)
        streams = transport.streams[transport.rank]
        return [
            from_bytes(body, streams, header[BATCH], header[VALUES], transport.weighted)
            for body, header in zip(bodies, self._received, strict=True)
        ]

    def _second(self, sizes_in: list[int]) -> Sequence[torch.Tensor]:
        """What did not fit, by rank."""
        sizes_out = [size if size > room else 0 for size, room in zip(self._sizes_out, self._rooms_out, strict=True)]
        pieces = [piece for size, of_rank in zip(sizes_out, self._pieces(), strict=True) if size for piece in of_rank]
        arrived = self._transport.buffers.empty(sum(sizes_in), torch.uint8)
        comm.all_to_all(arrived, self._joined(pieces), sizes_in, sizes_out, self._transport.group)()
        return arrived.split(sizes_in)

    def _joined(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        buffer = self._transport.buffers.empty(sum(piece.numel() for piece in pieces), torch.uint8)
        return torch.cat(list(pieces), out=buffer) if pieces else buffer
