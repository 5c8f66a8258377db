"""How this process's C library keeps the CPU memory that tensors free.

A CPU step allocates and frees messages of some megabytes. By default glibc returns such memory to the system, and
every step pays a page fault for each 4 KiB of it, which takes longer than the exchange. GPUs have torch's caching
allocator for this.
"""

from __future__ import annotations

import ctypes
from functools import cache

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # of malloc.h


@cache
def keep_freed_memory() -> None:
    """Makes glibc's malloc keep freed memory of any size for later tensors, for the rest of the process.

    Resident memory so stays near its peak. Other C libraries and allocators are left as they are.

    Against a pool of torch buffers, a step of 26 tables of dimension 64 on 2 ranks of one thread takes 0.7 to 1.0 times
    the CPU time (batch 2048 and 8192, table-wise and row-wise), page faults a step fall from between 5,000 and 40,000
    to 0, and the peak of resident memory is 7 % higher.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)  # M_MMAP_THRESHOLD would not do: glibc caps it at 32 MiB
        mallopt(_M_TRIM_THRESHOLD, -1)
