"""Exchanges among the CPU ranks of one host: memory that they share, and a few words on a socket to say what is where.

gloo sends every number through TCP and hands every exchange to threads, which for the kilobytes of a small batch takes
longer than the lookups that they are for. Here a rank copies what it sends into memory of its own that the others have
mapped, tells each of them the place, and goes on; who waits reads it from there. A call into the kernel on both sides
orders the copies, and where a rank has died the others' next one says so.

The memory has no name (`memfd_create`, passed along the socket), so nothing is left behind however a process ends.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

Wait = Callable[[], None]

LEAST_BYTES = 1 << 16  # of a piece of memory; its size doubles where a message does not fit
KEPT_BYTES = 1 << 26  # larger memory serves one message
_PACKET = struct.Struct("<6q")  # number, slot, bytes of its new memory or 0, offset, bytes, messages read of the other


class UnlikeExchanges(ValueError):
    """Ranks are at different exchanges, or do not agree how much one of them sends to another."""


class Memory:
    """Bytes that other processes have mapped, too.

    Args:
        fd: of the memory; may be closed afterwards.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        self._map = torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", True, num_bytes)  # keeps no descriptor
        self.num_bytes, self.address = num_bytes, self._map.data_ptr()


class Slot:
    """Memory of this rank for one message at a time: free again when all others have read the last one."""

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self.last: int  # number of the message that it holds or held

    def hold(self, number: int, num_bytes: int) -> int | None:
        """Takes the message of that number; a descriptor to close, of new memory where it did not fit."""
        self.last = number
        if self.memory is not None and num_bytes <= self.memory.num_bytes <= KEPT_BYTES:
            return None
        size = max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        fd = os.memfd_create("rayrec-exchange")
        os.ftruncate(fd, size)
        self.memory = Memory(fd, size)
        return fd


class Peer:
    """Another rank of the host, as this one sees it."""

    def __init__(self, rank: int, link: socket.socket) -> None:
        self.rank, self.socket = rank, link
        self.slots: dict[int, Memory] = {}  # its memory, by slot
        self.read = 0  # messages of it that this rank has read
        self.acknowledged = 0  # messages of this rank that it has read


@dataclass(frozen=True, slots=True)
class Awaited:
    """An exchange that is under way: where its bytes go, and how many of each rank, starting where; or, if sizes are
    not known before, the messages to be filled."""

    output: torch.Tensor  # kept alive
    address: int
    firsts: Sequence[int]
    sizes: Sequence[int]
    messages: list[torch.Tensor] | None = None


class HostLink:
    """Joins the ranks of one host; all must begin the same exchanges in the same order.

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
        self._slots: list[Slot] = []
        self._awaited: deque[Awaited] = deque()
        self._begun = self._ended = 0  # exchanges
        self.world_size = len(sockets) + 1
        self._packet = bytearray(_PACKET.size)
        self._beginning, self._reading = threading.Lock(), threading.Lock()
        weakref.finalize(self, close, list(sockets.values()))

    def all_to_all(self, output: torch.Tensor, inputs: torch.Tensor, come: Sequence[int], leave: Sequence[int]) -> Wait:
        """Sends `leave[r]` bytes of `inputs` to each rank r, and receives `come[r]` bytes likewise into `output`."""
        firsts, offsets = [0, *accumulate(come)], [0, *accumulate(leave)]
        _check(output, inputs, firsts.pop() == output.nbytes and offsets.pop() == inputs.nbytes)
        rank, own, source = self.rank, leave[self.rank], inputs.data_ptr()
        first, end = offsets[rank], offsets[rank] + own
        ctypes.memmove(output.data_ptr() + firsts[rank], source + first, own)
        pieces = ((source, first), (source + end, inputs.nbytes - end))
        places = [offset if other < rank else offset - own for other, offset in enumerate(offsets)]
        return self._begin(pieces, places, leave, Awaited(output, output.data_ptr(), firsts, come))

    def all_gather(self, output: torch.Tensor, inputs: torch.Tensor, come: Sequence[int]) -> Wait:
        """Sends all of `inputs` to every rank, and receives `come[r]` bytes of each into `output`."""
        rank, source, size = self.rank, inputs.data_ptr(), inputs.nbytes
        firsts = [0, *accumulate(come)]
        _check(output, inputs, firsts.pop() == output.nbytes and come[rank] == size)
        ctypes.memmove(output.data_ptr() + firsts[rank], source, size)
        world = len(come)
        return self._begin(
            ((source, size),), [0] * world, [size] * world, Awaited(output, output.data_ptr(), firsts, come)
        )

    def exchange(self, words: torch.Tensor, leave: Sequence[int]) -> Callable[[], list[torch.Tensor]]:
        """Sends `leave[r]` bytes of flat `words` to each rank r; the function that it returns waits for every rank's
        message, of any size, in `words`' type."""
        offsets = [0, *accumulate(leave)]
        _check(words, words, offsets.pop() == words.nbytes)
        rank, own, source, item = self.rank, leave[self.rank], words.data_ptr(), words.element_size()
        first, end = offsets[rank], offsets[rank] + own
        messages: list[torch.Tensor] = [words.new_empty(0)] * len(leave)
        messages[rank] = words[first // item : end // item]
        pieces = ((source, first), (source + end, words.nbytes - end))
        places = [offset if other < rank else offset - own for other, offset in enumerate(offsets)]
        wait = self._begin(pieces, places, leave, Awaited(words, 0, (), (), messages))

        def finish() -> list[torch.Tensor]:
            wait()
            return messages

        return finish

    def _begin(
        self,
        pieces: Sequence[tuple[int, int]],
        places: Sequence[int],
        sizes: Sequence[int],
        awaited: Awaited,
    ) -> Wait:
        """Sends a message of some pieces of memory (address, bytes), of which a rank's part is `sizes` at `places`."""
        with self._beginning:
            number, slots = self._begun, self._slots
            read_by_all = min(peer.acknowledged for peer in self._peers)
            place = next((n for n, slot in enumerate(slots) if slot.last < read_by_all), len(slots))
            if place == len(slots):
                slots.append(Slot())
            fd = slots[place].hold(number, sum(size for _, size in pieces))
            memory = slots[place].memory
            assert memory is not None
            target = memory.address
            for source, size in pieces:
                ctypes.memmove(target, source, size)
                target += size
            new = memory.num_bytes if fd is not None else 0
            self._awaited.append(awaited)
            self._begun += 1
            try:
                for peer in self._peers:
                    other = peer.rank
                    self._send(peer, (number, place, new, places[other], sizes[other], peer.read), fd)
            finally:
                if fd is not None:
                    os.close(fd)

        def wait() -> None:
            with self._reading:
                self._end(number)

        return wait

    def _send(self, peer: Peer, words: tuple[int, ...], fd: int | None) -> None:
        try:
            peer.socket.send(_PACKET.pack(*words))
            if fd is not None:
                socket.send_fds(peer.socket, [b"m"], [fd])
        except (OSError, TimeoutError) as error:
            raise self._lost(peer) from error

    def _end(self, number: int) -> None:
        """Reads what is missing of the exchanges up to that number."""
        while self._ended <= number:
            awaited = self._awaited[0]
            for peer in self._peers:
                if peer.read == self._ended:
                    self._read(peer, awaited)
            self._awaited.popleft()
            self._ended += 1

    def _read(self, peer: Peer, awaited: Awaited) -> None:
        messages = awaited.messages
        try:
            got = peer.socket.recv_into(self._packet)
        except TimeoutError:
            message = f"rank {peer.rank} has not come to an exchange within {self._timeout_s:g} s"
            raise TimeoutError(message) from None
        except OSError as error:
            raise self._lost(peer) from error
        if not got:
            raise self._lost(peer)
        number, slot, new, offset, size, peer.acknowledged = _PACKET.unpack(self._packet)
        if new:
            _, (fd,), *_ = socket.recv_fds(peer.socket, 1, 1)
            peer.slots[slot] = Memory(fd, new)
            os.close(fd)
        expected = size if messages is not None else awaited.sizes[peer.rank]
        if (number, size) != (peer.read, expected):
            raise UnlikeExchanges(
                f"rank {peer.rank} sends {size} bytes in its exchange {number}, rank {self.rank} expects {expected} in "
                f"its exchange {peer.read}: what a model or a callback does must not depend on the rank"
            )
        memory = peer.slots[slot]
        if messages is not None:
            messages[peer.rank] = awaited.output.new_empty(size // awaited.output.element_size())
            ctypes.memmove(messages[peer.rank].data_ptr(), memory.address + offset, size)
        else:
            ctypes.memmove(awaited.address + awaited.firsts[peer.rank], memory.address + offset, size)
        if memory.num_bytes > KEPT_BYTES:
            del peer.slots[slot]
        peer.read += 1

    def _lost(self, peer: Peer) -> ConnectionError:
        return ConnectionError(f"rank {peer.rank} has ended, or has left its process group")


def _check(output: torch.Tensor, inputs: torch.Tensor, fit: bool) -> None:
    if not fit:
        raise ValueError("an exchange's parts do not add up to its tensors")
    if not (output.is_contiguous() and inputs.is_contiguous()):
        raise ValueError("tensors that are exchanged must be contiguous: call .contiguous()")


def close(sockets: Sequence[socket.socket]) -> None:
    for link in sockets:
        link.close()
