"""Anonymous memory shared by processes of a host: created by a rank, mapped by peers that receive its descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

LEAST_BYTES = 1 << 16  # minimum size of a slot, which is a power of two
KEPT_BYTES = 1 << 30  # maximum size of all slots of a link; other messages get memory for one use
ONCE = -1  # slot number of memory for one message

# ctypes, because Python's mmap keeps a descriptor per map, and torch's leaks one if a map fails.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedMemoryError(OSError):
    """The system refuses memory, or a descriptor, to share with other ranks."""


class Memory:
    """Mapped shared memory. Pages use memory once they are written.

    Args:
        fd: Descriptor of the memory. It may be closed afterwards.
        num_bytes: Size.

    Raises:
        SharedMemoryError: The memory cannot be mapped.
    """

    def __init__(self, fd: int, num_bytes: int) -> None:
        address = _libc.mmap(None, num_bytes, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED, fd, 0)
        if address in (None, _MAP_FAILED):
            code = ctypes.get_errno()
            raise SharedMemoryError(
                code,
                f"cannot map {num_bytes} bytes that ranks of this host share ({os.strerror(code)}); raise the limit of "
                "this process's memory (ulimit -v) or of its container, or use smaller batches",
            )
        self.num_bytes, self.address = num_bytes, address
        weakref.finalize(self, _libc.munmap, address, num_bytes).atexit = False


def make_memory(num_bytes: int) -> tuple[Memory, int]:
    """Returns new memory and its descriptor, which the caller closes."""
    try:
        fd = os.memfd_create("rayrec-exchange")
    except OSError as error:
        raise SharedMemoryError(error.errno, f"cannot make memory to share: {error.strerror}") from error
    try:
        os.ftruncate(fd, num_bytes)
        return Memory(fd, num_bytes), fd
    except BaseException:
        os.close(fd)
        raise


def mapped(fds: Sequence[int], num_bytes: int) -> Memory:
    """Maps a peer's memory by its received descriptor."""
    if not fds:
        raise SharedMemoryError("no descriptor is free for a peer's memory; raise the limit of open files (ulimit -n)")
    try:
        return Memory(fds[0], num_bytes)
    finally:
        for fd in fds:
            os.close(fd)


class Slot:
    """Memory of this rank for one message at a time. It is free once all peers have read its last message."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.last = -1  # number of its last message


class Slots:
    """Memory of this rank's messages: at most `KEPT_BYTES`, kept until the link ends."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []

    def hold(self, number: int, num_bytes: int, read_by_all: int) -> tuple[int, Memory, int | None]:
        """Returns memory for a message: the smallest free slot that is large enough, else new memory.

        Args:
            number: Number of the message.
            num_bytes: Its size.
            read_by_all: Number of messages that all peers have read.

        Returns:
            The slot, its memory, and the descriptor of new memory, which the caller closes.
        """
        best, largest = None, None
        for index, slot in enumerate(self._slots):
            if slot.last < read_by_all:
                size = slot.memory.num_bytes
                if size >= num_bytes and (best is None or size < self._slots[best].memory.num_bytes):
                    best = index
                if largest is None or size > self._slots[largest].memory.num_bytes:
                    largest = index
        if best is not None:
            self._slots[best].last = number
            return best, self._slots[best].memory, None
        index, memory, fd = self._make(len(self._slots) if largest is None else largest, num_bytes)
        if index != ONCE:
            self._slots[index].last = number
        return index, memory, fd

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Size of all slots."""
        return sum(slot.memory.num_bytes for slot in self._slots)

    def _make(self, index: int, num_bytes: int) -> tuple[int, Memory, int]:
        """Creates memory in slot `index`, which is free or new; for one use if the slots would exceed `KEPT_BYTES`."""
        size = max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        replaced = self._slots[index].memory.num_bytes if index < len(self._slots) else 0
        if self.num_bytes - replaced + size > KEPT_BYTES:
            index, size = ONCE, max(num_bytes, 1)
        memory, fd = make_memory(size)
        if index == len(self._slots):
            self._slots.append(Slot(memory))
        elif index != ONCE:
            self._slots[index].memory = memory
        return index, memory, fd
