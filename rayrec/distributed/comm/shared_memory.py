"""Memory without a name that processes of a host share: made here, mapped by the peers that get its descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

LEAST_BYTES = 1 << 16  # of a slot; its size is a power of two
KEPT_BYTES = 1 << 30  # of all slots of a link together; a message beyond has memory of its own
ONCE = -1  # in place of a slot: memory of one message

# By ctypes: Python's mmap keeps a descriptor for each map, and torch's leaves one open where a map fails.
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
_libc.mmap.restype = ctypes.c_void_p
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


class SharedMemoryError(OSError):
    """The system gives a rank no memory, or no descriptor, to share with the others."""


class Memory:
    """Bytes that other processes have mapped, too. Pages take memory once they are written.

    Args:
        fd: of the memory; may be closed afterwards.
        num_bytes: its size.

    Raises:
        SharedMemoryError: it cannot be mapped.
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
    """New memory, and its descriptor, which the caller closes."""
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
    """A peer's memory, of which the kernel passed a descriptor."""
    if not fds:
        raise SharedMemoryError("no descriptor is free for a peer's memory; raise the limit of open files (ulimit -n)")
    try:
        return Memory(fds[0], num_bytes)
    finally:
        for fd in fds:
            os.close(fd)


class Slot:
    """Memory of this rank for one message at a time: free again when all others have read its last message."""

    def __init__(self, memory: Memory) -> None:
        self.memory = memory
        self.last = -1  # number of the message that it holds or held


class Slots:
    """The memory that this rank sends from: at most `KEPT_BYTES`, kept until the link ends."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []

    def hold(self, number: int, num_bytes: int, read_by_all: int) -> tuple[int, Memory, int | None]:
        """Memory for a message: the smallest free slot where it fits, else new memory.

        Args:
            number: of the message.
            num_bytes: its size.
            read_by_all: so many messages have been read by all others.

        Returns:
            The slot, its memory, and the descriptor of new memory, which the caller closes.
        """
        best, largest = None, None
        for place, slot in enumerate(self._slots):
            if slot.last < read_by_all:
                size = slot.memory.num_bytes
                if size >= num_bytes and (best is None or size < self._slots[best].memory.num_bytes):
                    best = place
                if largest is None or size > self._slots[largest].memory.num_bytes:
                    largest = place
        if best is not None:
            self._slots[best].last = number
            return best, self._slots[best].memory, None
        place, memory, fd = self._make(len(self._slots) if largest is None else largest, num_bytes)
        if place != ONCE:
            self._slots[place].last = number
        return place, memory, fd

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def num_bytes(self) -> int:
        """Of all slots."""
        return sum(slot.memory.num_bytes for slot in self._slots)

    def _make(self, place: int, num_bytes: int) -> tuple[int, Memory, int]:
        """New memory in a free slot, or in one more; of one message if slots would be too large together."""
        size = max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length())
        replaced = self._slots[place].memory.num_bytes if place < len(self._slots) else 0
        if self.num_bytes - replaced + size > KEPT_BYTES:
            place, size = ONCE, max(num_bytes, 1)
        memory, fd = make_memory(size)
        if place == len(self._slots):
            self._slots.append(Slot(memory))
        elif place != ONCE:
            self._slots[place].memory = memory
        return place, memory, fd
