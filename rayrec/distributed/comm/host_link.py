"""Exchanges among the CPU ranks of one host through memory that they share, ordered by messages on sockets.

gloo sends every number through TCP and hands every exchange to threads, which for the kilobytes of a small batch takes
longer than the lookups. Here a rank copies what it sends into memory of its own that the others have mapped, sends
each of them a packet with the place, and goes on; the receiver's wait reads it from there. The kernel orders the copies
by the packets. A rank that has died closes its sockets, so that the next exchange of the others raises.

The memory has no name (`memfd_create`, its descriptor sent along the socket), so nothing is left behind however a
process ends.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from rayrec.distributed.comm.shared_memory import ONCE, Memory, Slots, mapped
from rayrec.distributed.comm.trace import EXCHANGE, span

Wait = Callable[[], None]

_PACKET = struct.Struct("<6q")  # number, slot, bytes of its new memory or 0, offset, bytes, messages read of the peer

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # of this process; closed in forked children


class UnlikeExchanges(ValueError):
    """Ranks are at different exchanges, or do not agree how much one of them sends to another."""


class Peer:
    """Another rank of the host, as this one sees it."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        self.rank, self.socket = rank, link
        self.slots: dict[int, Memory] = {}  # its memory, by slot
        self.read = 0  # messages of it that this rank has read
        self.acknowledged = 0  # messages of this rank that it has read


@dataclass(frozen=True, slots=True)
class Arrival:
    """What an exchange that has begun will receive.

    Args:
        sizes: bytes that each rank sends; None if they may send any.
        read: takes a rank's message, given its address and bytes, while it lies in that rank's memory.
    """

    sizes: Sequence[int] | None
    read: Callable[[int, int, int], None]


class HostLink:
    """Joins the ranks of one host. All ranks begin the same exchanges in the same order.

    A process that is forked from a rank has no part in it: its copies of the sockets are closed, so that the others see
    the rank's end although the child lives.

    Args:
        rank: of this process.
        sockets: to every other rank.
        timeout_s: how long a rank waits for another one.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank, self._peers = rank, [Peer(other, sockets[other]) for other in sorted(sockets)]
        for link in sockets.values():
            link.settimeout(timeout_s)
        self._timeout_s = timeout_s
        self._slots = Slots()
        self._arrivals: deque[Arrival] = deque()
        self._begun = self._ended = 0  # exchanges
        self.world_size = len(sockets) + 1
        self._packet = bytearray(_PACKET.size)
        self._beginning, self._reading = threading.Lock(), threading.Lock()
        _open_sockets.update(sockets.values())
        weakref.finalize(self, close, list(sockets.values()))

    def all_to_all(
        self,
        output: torch.Tensor,
        inputs: torch.Tensor,
        output_splits: Sequence[int] | None = None,
        input_splits: Sequence[int] | None = None,
    ) -> Wait:
        """Sends `input_splits[r]` leading rows of `inputs` to each rank r; receives `output_splits[r]` into `output`.

        Without splits, parts are equal.
        """
        world = self.world_size
        come, leave = (
            [tensor.nbytes // world] * world if rows is None else [number * row for number in rows]
            for tensor, rows, row in (
                (output, output_splits, output[:1].nbytes),
                (inputs, input_splits, inputs[:1].nbytes),
            )
        )
        firsts, offsets = [0, *accumulate(come)], [0, *accumulate(leave)]
        _check(output, inputs, firsts.pop() == output.nbytes and offsets.pop() == inputs.nbytes)
        own, source = self.rank, inputs.data_ptr()
        ctypes.memmove(output.data_ptr() + firsts[own], source + offsets[own], leave[own])

        def write(rank: int, address: int) -> None:
            ctypes.memmove(address, source + offsets[rank], leave[rank])

        return self._send_each(leave, write, _into(output, firsts, come))

    def all_gather(self, output: torch.Tensor, inputs: torch.Tensor, come: Sequence[int]) -> Wait:
        """Sends all of `inputs` to every rank, and receives `come[r]` bytes of each into `output`."""
        rank, source, size = self.rank, inputs.data_ptr(), inputs.nbytes
        firsts = [0, *accumulate(come)]
        _check(output, inputs, firsts.pop() == output.nbytes and come[rank] == size)
        ctypes.memmove(output.data_ptr() + firsts[rank], source, size)
        world = len(come)

        def fill(address: int) -> None:
            ctypes.memmove(address, source, size)

        return self._begin(fill, size, [0] * world, [size] * world, _into(output, firsts, come))

    def exchange(self, parts: Sequence[Sequence[torch.Tensor]], own: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Sends the flat, contiguous tensors `parts[r]` to each rank r; the function that it returns waits for every
        rank's message, of any size, in the type of `own`, this rank's message, and returns them."""
        leave = [sum(piece.nbytes for piece in part) for part in parts]
        messages: list[torch.Tensor] = [own.new_empty(0)] * len(parts)
        messages[self.rank] = own

        def read(rank: int, address: int, size: int) -> None:
            messages[rank] = own.new_empty(size // own.element_size())
            ctypes.memmove(messages[rank].data_ptr(), address, size)

        def write(rank: int, address: int) -> None:
            for piece in parts[rank]:
                ctypes.memmove(address, piece.data_ptr(), piece.nbytes)
                address += piece.nbytes

        wait = self._send_each(leave, write, Arrival(None, read))

        def wait_for_messages() -> list[torch.Tensor]:
            wait()
            return messages

        return wait_for_messages

    def in_place(
        self,
        leave: Sequence[int],
        write: Callable[[int, int], None],
        come: Sequence[int],
        read: Callable[[int, int, int], None],
    ) -> Wait:
        """Exchanges `leave[r]` and `come[r]` bytes with each other rank r without a copy of its own.

        Args:
            write: makes the message for a rank at an address; is called before this returns.
            read: takes a rank's message at an address, of some bytes, where that rank has made it. It is called in the
                order of ranks, at the latest by the wait, maybe in another thread.
        """
        return self._send_each(leave, write, Arrival(come, read))

    def _send_each(self, leave: Sequence[int], write: Callable[[int, int], None], arrival: Arrival) -> Wait:
        """Sends a message of its own, of `leave[r]` bytes, to each other rank r."""
        others = (size if rank != self.rank else 0 for rank, size in enumerate(leave))
        *places, num_bytes = accumulate(others, initial=0)

        def fill(address: int) -> None:
            for peer in self._peers:
                write(peer.rank, address + places[peer.rank])

        return self._begin(fill, num_bytes, places, leave, arrival)

    def _begin(
        self,
        fill: Callable[[int], None],
        num_bytes: int,
        places: Sequence[int],
        sizes: Sequence[int],
        arrival: Arrival,
    ) -> Wait:
        """Sends a message, which `fill` writes at an address; rank r's part is `sizes[r]` bytes from `places[r]`."""
        with self._beginning:
            number = self._begun
            read_by_all = min(peer.acknowledged for peer in self._peers)
            slot, memory, fd = self._slots.hold(number, num_bytes, read_by_all)
            try:
                fill(memory.address)
                new = memory.num_bytes if fd is not None else 0
                self._arrivals.append(arrival)
                self._begun += 1
                for peer in self._peers:
                    try:
                        packet = _PACKET.pack(number, slot, new, places[peer.rank], sizes[peer.rank], peer.read)
                        peer.socket.send(packet)
                        if fd is not None:
                            socket.send_fds(peer.socket, [b"m"], [fd])
                    except OSError as error:
                        raise self._failed(peer, error) from error
            finally:
                if fd is not None:
                    os.close(fd)

        def wait() -> None:
            with span(EXCHANGE), self._reading:
                while self._ended <= number:  # exchanges end in the order in which they begin
                    for peer in self._peers:
                        if peer.read == self._ended:
                            self._read(peer, self._arrivals[0])
                    self._arrivals.popleft()
                    self._ended += 1

        return wait

    def _read(self, peer: Peer, arrival: Arrival) -> None:
        """Waits for a peer's message, and reads it."""
        fds: Sequence[int] = ()
        try:
            if not peer.socket.recv_into(self._packet):
                raise EOFError
            number, slot, new, offset, size, peer.acknowledged = _PACKET.unpack(self._packet)
            if new:
                mark, fds, *_ = socket.recv_fds(peer.socket, 1, 1)
                if not mark:
                    raise EOFError
        except (OSError, EOFError) as error:
            raise self._failed(peer, error) from error
        if new:
            peer.slots[slot] = mapped(fds, new)
        expected = size if arrival.sizes is None else arrival.sizes[peer.rank]
        if (number, size) != (peer.read, expected):
            raise UnlikeExchanges(
                f"rank {peer.rank} sends {size} bytes in its exchange {number}, rank {self.rank} expects {expected} in "
                f"its exchange {peer.read}: the exchanges of a model or a callback must not depend on the rank"
            )
        arrival.read(peer.rank, peer.slots[slot].address + offset, size)
        peer.slots.pop(ONCE, None)
        peer.read += 1

    def _failed(self, peer: Peer, error: Exception) -> OSError:
        """The error to raise for one of a peer's socket."""
        if isinstance(error, TimeoutError):
            return TimeoutError(f"rank {peer.rank} has not come to an exchange within {self._timeout_s:g} s")
        return ConnectionError(f"rank {peer.rank} has ended, or has left its process group")


def _into(output: torch.Tensor, firsts: Sequence[int], sizes: Sequence[int]) -> Arrival:
    """Each rank's message is copied into `output`, which this keeps alive, from byte `firsts[r]` on."""

    def read(rank: int, address: int, size: int) -> None:
        ctypes.memmove(output.data_ptr() + firsts[rank], address, size)

    return Arrival(sizes, read)


def _check(output: torch.Tensor, inputs: torch.Tensor, fit: bool) -> None:
    if not fit:
        raise ValueError("an exchange's parts do not add up to its tensors")
    if not (output.is_contiguous() and inputs.is_contiguous()):
        raise ValueError("tensors that are exchanged must be contiguous: call .contiguous()")


def close(sockets: Iterable[socket.socket]) -> None:
    for link in list(sockets):
        link.close()


os.register_at_fork(after_in_child=lambda: close(_open_sockets))
