"""Whether the hosts have room for a copy of what their ranks save."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch

from rayrec.distributed import comm

_SHARE = 0.8  # of what is free; the rest is for the pages of the files, and for training


def fits_in_memory(need_bytes: int, group: comm.Group) -> bool:
    """Whether every host has room for what its ranks need together. A collective; every rank gets the same answer."""
    need_bytes = max(0, need_bytes - pinned_bytes())
    return _fit(comm.all_gather_object((socket.gethostname(), need_bytes, available_bytes()), group))


def copy_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Host memory that copies of these tensors take; torch rounds pinned memory up to powers of two."""
    return sum(1 << (of.nbytes - 1).bit_length() if of.is_cuda and of.nbytes else of.nbytes for of in tensors)


def pinned_bytes() -> int:
    """Pinned memory that torch keeps from earlier copies of this process, and uses for the next ones."""
    if not torch.cuda.is_available():
        return 0
    stats = torch.cuda.host_memory_stats()
    return int(stats.get("allocated_bytes.current", 0) - stats.get("active_bytes.current", 0))


def _fit(demands: Iterable[tuple[str, int, int]]) -> bool:
    """For each rank: host, bytes needed, and bytes available there."""
    needs: dict[str, int] = defaultdict(int)
    free: dict[str, int] = {}
    for host, need, available in demands:
        needs[host] += need
        free[host] = min(available, free.get(host, available))
    return all(needs[host] <= _SHARE * free[host] for host in needs)


def available_bytes(root: Path = Path("/")) -> int:
    """Memory of this host that is free or can be freed, and that this container may still take.

    Args:
        root: of the file system with /proc and /sys.
    """
    available = 1 << 62
    with suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
    with suppress(OSError, ValueError):  # "max" is no number
        group = root / "sys/fs/cgroup"
        limit, used = (int((group / f"memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current"))
        available = min(available, limit - used)
    return available
