"""Memory and CPUs that this process may use: the limits of its container (cgroup v1 or v2), or the machine's.

See Linux's Documentation/admin-guide/cgroup-v2.rst (memory.max, cpu.max) and cgroup-v1 (memory.rst; sched-bwc.rst for
cpu.cfs_quota_us). The kernel enforces the limits of all parent groups, so they count as well.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")


def memory_bytes(root: Path = ROOT) -> int:
    """Bytes of RAM that this process may use: the machine's, or the tightest limit of its control groups.

    Args:
        root: Folder of `proc` and `sys`.
    """
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [_number(group / "memory.max") for group in _groups(root, "")]
    limits += [_number(group / "memory.limit_in_bytes") for group in _groups(root, "memory")]
    return min([machine, *(int(limit) for limit in limits if limit)])


def available_bytes(root: Path = ROOT) -> int:
    """Memory of this host that is free or can be freed, and that this container may still use.

    Args:
        root: folder that contains `proc` and `sys`.
    """
    available = 1 << 62
    with suppress(OSError, ValueError, IndexError):
        for line in (root / "proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) << 10
    with suppress(OSError, ValueError):  # "max" is not a number
        group = root / "sys/fs/cgroup"
        limit, used = (int((group / f"memory.{name}").read_text(encoding="utf-8")) for name in ("max", "current"))
        available = min(available, limit - used)
    return available


def cpus(root: Path = ROOT) -> float:
    """CPUs that this process may use: its CPU affinity, or the tightest quota, which may be a fraction."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [_quota(_words(group / "cpu.max")) for group in _groups(root, "")]
    for group in _groups(root, "cpu"):
        quotas.append(_quota([*_words(group / "cpu.cfs_quota_us"), *_words(group / "cpu.cfs_period_us")]))
    return min([float(affinity), *(quota for quota in quotas if quota)])


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yields the folders of this process's control group and its parents. `controller` is empty for version 2.

    Inside a container the kernel may report the host's path; then the container's group is the root of the mount.
    """
    mount = root / "sys/fs/cgroup"
    for line in _lines(root / "proc/self/cgroup"):
        _, names, path = line.split(":", 2)
        if controller not in names.split(","):
            continue
        base = mount / names if controller and (mount / names).exists() else mount / controller
        group = Path(path)
        yield from (base / parent.relative_to("/") for parent in (group, *group.parents) if parent.is_absolute())


def _quota(words: list[str]) -> float | None:
    """CPUs of a quota and its period, both in microseconds. None without a limit."""
    if len(words) < 2 or not words[0].isdigit() or not int(words[1]):
        return None  # "max", -1, or a missing file
    return int(words[0]) / int(words[1]) or None


def _number(path: Path) -> float | None:
    words = _words(path)
    return float(words[0]) if words and words[0].isdigit() else None


def _words(path: Path) -> list[str]:
    return " ".join(_lines(path)).split()


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
