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
import secrets
import socket
import struct
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.distributed as dist

Wait = Callable[[], None]

_links: weakref.WeakKeyDictionary[dist.ProcessGroup, HostLink | None] = weakref.WeakKeyDictionary()
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
        self.last = -1  # number of the message that it holds or held

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
    """An exchange that is under way: where its bytes go, and how many of each rank, starting where."""

    output: torch.Tensor  # kept alive
    address: int
    firsts: Sequence[int]
    sizes: Sequence[int]


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
        weakref.finalize(self, _close, list(sockets.values()))

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
        expected = awaited.sizes[peer.rank]
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
        if (number, size) != (peer.read, expected):
            raise UnlikeExchanges(
                f"rank {peer.rank} sends {size} bytes in its exchange {number}, rank {self.rank} expects {expected} in "
                f"its exchange {peer.read}: what a model or a callback does must not depend on the rank"
            )
        memory = peer.slots[slot]
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


def _close(sockets: Sequence[socket.socket]) -> None:
    for link in sockets:
        link.close()


def link_of(group: dist.ProcessGroup, tensor: torch.Tensor) -> HostLink | None:
    """What joins the ranks of a group for CPU tensors, if they are all on one host; found when first asked for.

    A collective, the first time.
    """
    if tensor.device.type != "cpu":
        return None
    if group not in _links:
        on_gloo = "gloo" in group._get_backend(torch.device("cpu")).name().lower()
        _links[group] = connect(group) if on_gloo else None
    return _links[group]


def connect(group: dist.ProcessGroup) -> HostLink | None:
    """Joins the ranks of a group on CPUs; None where they are not all on one host, or it cannot share memory.

    A collective.
    """
    listener, address = _listen()
    with listener:
        told: list[tuple[str, str]] = [("", "")] * group.size()
        dist.all_gather_object(told, (_host() if address else "", address), group=group)
        if len({host for host, _ in told}) > 1 or not address:
            return None
        rank, timeout_s = group.rank(), group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
        sockets = _sockets(rank, [name for _, name in told], listener, timeout_s)
        joined = [False] * group.size()
        dist.all_gather_object(joined, len(sockets) == group.size() - 1, group=group)
        if not all(joined):
            _close(list(sockets.values()))
            return None
    return HostLink(rank, sockets, timeout_s)


def _listen() -> tuple[socket.socket, str]:
    """A socket for the others to find, and its name, which nobody else can guess; no name where this does not work."""
    listener = socket.socket(socket.AF_UNIX, getattr(socket, "SOCK_SEQPACKET", socket.SOCK_STREAM))
    name = f"rayrec-{secrets.token_hex(16)}"
    try:
        os.close(os.memfd_create("rayrec-try"))
        listener.bind(f"\0{name}")  # of Linux: it is in no folder, and ends with the process
        listener.listen(4096)
    except (OSError, AttributeError):
        return listener, ""
    return listener, name


def _host() -> str:
    """The running kernel and its network that this process is in: within them such sockets find each other."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/net')} {os.getuid()}"
    except OSError:
        return secrets.token_hex(16)  # like no other


def _sockets(rank: int, names: Sequence[str], listener: socket.socket, timeout_s: float) -> dict[int, socket.socket]:
    """To each other rank: this one calls those below it, and is called by those above; fewer where that fails."""
    sockets: dict[int, socket.socket] = {}
    try:
        for other in range(rank):
            link = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            link.settimeout(timeout_s)
            link.connect(f"\0{names[other]}")
            link.send(rank.to_bytes(4, "little"))
            sockets[other] = link
        listener.settimeout(timeout_s)
        while len(sockets) < len(names) - 1:
            link, _ = listener.accept()
            link.settimeout(timeout_s)
            sockets[int.from_bytes(link.recv(4), "little")] = link
    except OSError:
        pass  # told to all by the number of sockets
    return sockets
