"""Whether the hosts have room for a copy of what their ranks save."""

from __future__ import annotations

import socket
from collections import defaultdict
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from rayrec.distributed import comm

_SHARE = 0.8  # of what is free; the rest is for the pages of the files, and for training


def fits_in_memory(need_bytes: int, group: comm.Group) -> bool:
    """Whether every host has room for what its ranks need together. A collective; every rank gets the same answer."""
    return _fit(comm.all_gather_object((socket.gethostname(), need_bytes, available_bytes()), group))


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
