"""Exchanges among the CPU ranks of one host through shared memory, ordered by messages on sockets.

gloo sends every number through TCP and hands every exchange to threads, which takes longer than the lookups for the
kilobytes of a small batch. Here a rank copies a message into its own memory, which its peers have mapped, and sends
each peer a packet with the location; the receiver's wait reads it from there. The kernel orders the copies by the
packets. A rank that dies closes its sockets, so that the next exchange of its peers raises.

The memory has no name (`memfd_create`; its descriptor travels over the socket), so nothing remains however a process
ends.
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
from functools import partial
from itertools import accumulate

import torch

from rayrec.distributed.comm.shared_memory import ONCE, Memory, Slots, mapped
from rayrec.distributed.comm.trace import EXCHANGE, span

Wait = Callable[[], None]
Write = Callable[[int, int], None]
"""Writes the message for a rank at an address."""

Read = Callable[[int, int, int], None]
"""Takes the message of a rank, given its address and its bytes, from that rank's memory."""

_PACKET = struct.Struct("<6q")  # exchange, slot, bytes of new memory or 0, offset, bytes, messages read

_open_sockets: weakref.WeakSet[socket.socket] = weakref.WeakSet()  # closed in forked children


class UnlikeExchanges(ValueError):
    """Ranks are at different exchanges, or disagree on the bytes that one of them sends to another."""


class Peer:
    """Another rank of the host, as this one sees it."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        self.rank, self.socket = rank, link
        self.slots: dict[int, Memory] = {}  # the peer's memory, by slot
        self.read = 0  # messages of the peer that this rank has read
        self.acknowledged = 0  # messages of this rank that the peer has read


class HostLink:
    """Joins the ranks of one host. All ranks start the same exchanges in the same order.

    A process that is forked from a rank has its copies of the sockets closed, so that the peers see the rank's end
    although the child lives.

    Args:
        rank: Rank of this process.
        sockets: A socket to every other rank.
        timeout_s: How long a rank waits for another one.
    """

    def __init__(self, rank: int, sockets: dict[int, socket.socket], timeout_s: float) -> None:
        self.rank, self._peers = rank, [Peer(peer, sockets[peer]) for peer in sorted(sockets)]
        for link in sockets.values():
            link.settimeout(timeout_s)
        self._timeout_s = timeout_s
        self._slots = Slots()
        self._expected: deque[tuple[Sequence[int] | None, Read]] = deque()  # of each exchange under way
        self._num_started = self._num_ended = 0
        self.world_size = len(sockets) + 1
        self._packet = bytearray(_PACKET.size)
        self._starting, self._reading = threading.Lock(), threading.Lock()
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

        Without splits, every rank gets an equal share.
        """
        come, leave = self._split_bytes(output, output_splits), self._split_bytes(inputs, input_splits)
        firsts, offsets = [0, *accumulate(come)], [0, *accumulate(leave)]
        _check(output, inputs, firsts.pop() == output.nbytes and offsets.pop() == inputs.nbytes)
        rank, source = self.rank, inputs.data_ptr()
        ctypes.memmove(output.data_ptr() + firsts[rank], source + offsets[rank], leave[rank])

        def write(peer: int, address: int) -> None:
            ctypes.memmove(address, source + offsets[peer], leave[peer])

        return self.in_place(leave, write, come, partial(_copy_into, output, firsts))

    def _split_bytes(self, tensor: torch.Tensor, rows: Sequence[int] | None) -> list[int]:
        """Bytes of each rank's rows of a tensor."""
        if rows is None:
            return [tensor.nbytes // self.world_size] * self.world_size
        row_bytes = tensor[:1].nbytes
        return [number * row_bytes for number in rows]

    def all_gather(self, output: torch.Tensor, inputs: torch.Tensor, come: Sequence[int]) -> Wait:
        """Sends `inputs` to every rank, and receives `come[r]` bytes of each rank r into `output`."""
        source, size, firsts = inputs.data_ptr(), inputs.nbytes, [0, *accumulate(come)]
        _check(output, inputs, firsts.pop() == output.nbytes and come[self.rank] == size)
        ctypes.memmove(output.data_ptr() + firsts[self.rank], source, size)

        def write(peer: int, address: int) -> None:
            ctypes.memmove(address, source, size)

        return self.in_place([size] * len(come), write, come, partial(_copy_into, output, firsts), shared=True)

    def exchange(self, parts: Sequence[Sequence[torch.Tensor]], own: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Sends the flat, contiguous tensors `parts[r]` to each rank r as one message of any size.

        Args:
            own: This rank's message to itself.

        Returns:
            A function that waits for every rank's message, in the data type of `own`.
        """
        messages: list[torch.Tensor] = [own.new_empty(0)] * len(parts)
        messages[self.rank] = own

        def write(peer: int, address: int) -> None:
            for tensor in parts[peer]:
                ctypes.memmove(address, tensor.data_ptr(), tensor.nbytes)
                address += tensor.nbytes

        def read(peer: int, address: int, size: int) -> None:
            messages[peer] = own.new_empty(size // own.element_size())
            ctypes.memmove(messages[peer].data_ptr(), address, size)

        wait = self.in_place([sum(tensor.nbytes for tensor in tensors) for tensors in parts], write, None, read)

        def wait_for_messages() -> list[torch.Tensor]:
            wait()
            return messages

        return wait_for_messages

    def in_place(
        self, leave: Sequence[int], write: Write, come: Sequence[int] | None, read: Read, shared: bool = False
    ) -> Wait:
        """Exchanges `leave[r]` and `come[r]` bytes with each other rank r, without copies besides `write` and `read`.

        Args:
            leave: Bytes for each rank.
            write: Called before this returns.
            come: Bytes of each rank; None accepts any number.
            read: Called in the order of ranks, in the wait of this exchange or of a later one, in any thread.
            shared: Every rank gets the same message, which is written once.
        """
        if shared:
            offsets, num_bytes = [0] * len(leave), leave[self.rank]
        else:
            *offsets, num_bytes = accumulate(
                (0 if peer == self.rank else size for peer, size in enumerate(leave)), initial=0
            )
        with self._starting:
            number = self._num_started
            read_by_all = min(peer.acknowledged for peer in self._peers)
            slot, memory, fd = self._slots.hold(number, num_bytes, read_by_all)
            try:
                for peer in self._peers[:1] if shared else self._peers:
                    write(peer.rank, memory.address + offsets[peer.rank])
                new_bytes = memory.num_bytes if fd is not None else 0
                self._expected.append((come, read))
                self._num_started += 1
                for peer in self._peers:
                    try:
                        size = leave[peer.rank]
                        peer.socket.send(_PACKET.pack(number, slot, new_bytes, offsets[peer.rank], size, peer.read))
                        if fd is not None:
                            socket.send_fds(peer.socket, [b"m"], [fd])
                    except OSError as error:
                        raise self._failed(peer, error) from error
            finally:
                if fd is not None:
                    os.close(fd)
        return partial(self._wait, number)

    def _wait(self, number: int) -> None:
        """Waits until the exchange `number` has ended."""
        with span(EXCHANGE), self._reading:
            while self._num_ended <= number:  # exchanges end in the order in which they start
                for peer in self._peers:
                    if peer.read == self._num_ended:
                        self._receive(peer, *self._expected[0])
                self._expected.popleft()
                self._num_ended += 1

    def _receive(self, peer: Peer, come: Sequence[int] | None, read: Read) -> None:
        """Waits for a peer's message, and reads it."""
        fds: Sequence[int] = ()
        try:
            if not peer.socket.recv_into(self._packet):
                raise EOFError
            number, slot, new_bytes, offset, size, peer.acknowledged = _PACKET.unpack(self._packet)
            if new_bytes:
                mark, fds, *_ = socket.recv_fds(peer.socket, 1, 1)
                if not mark:
                    raise EOFError
        except (OSError, EOFError) as error:
            raise self._failed(peer, error) from error
        if new_bytes:
            peer.slots[slot] = mapped(fds, new_bytes)
        expected = size if come is None else come[peer.rank]
        if (number, size) != (peer.read, expected):
            raise UnlikeExchanges(
                f"rank {peer.rank} sends {size} bytes in its exchange {number}, rank {self.rank} expects {expected} in "
                f"its exchange {peer.read}: the exchanges of a model or a callback must not depend on the rank"
            )
        read(peer.rank, peer.slots[slot].address + offset, size)
        peer.slots.pop(ONCE, None)
        peer.read += 1

    def _failed(self, peer: Peer, error: Exception) -> OSError:
        """The error to raise for an error of a peer's socket."""
        if isinstance(error, TimeoutError):
            return TimeoutError(f"rank {peer.rank} has not come to an exchange within {self._timeout_s:g} s")
        return ConnectionError(f"rank {peer.rank} has ended, or has left its process group")


def _copy_into(output: torch.Tensor, firsts: Sequence[int], rank: int, address: int, size: int) -> None:
    """Copies a rank's message into `output`, from byte `firsts[rank]` on."""
    ctypes.memmove(output.data_ptr() + firsts[rank], address, size)


def _check(output: torch.Tensor, inputs: torch.Tensor, sizes_match: bool) -> None:
    if not sizes_match:
        raise ValueError("an exchange's parts do not add up to its tensors")
    if not (output.is_contiguous() and inputs.is_contiguous()):
        raise ValueError("tensors that are exchanged must be contiguous: call .contiguous()")


def close(sockets: Iterable[socket.socket]) -> None:
    """Closes the sockets."""
    for link in list(sockets):
        link.close()


os.register_at_fork(after_in_child=lambda: close(_open_sockets))
