"""Memory without a name that processes of a host share: made here, mapped by the peers that get its descriptor."""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Sequence

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
