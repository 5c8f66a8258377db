"""Limits of control groups, version 1 and 2, as Linux shows them inside and outside of containers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rayrec._runtime.cgroup_limits import cpus, memory_bytes
from rayrec.distributed.planner import Topology
from rayrec.distributed.planner.machine import topology

MACHINE = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
HERE = len(os.sched_getaffinity(0))


def tree(root: Path, groups: str, files: dict[str, object]) -> Path:
    """A folder with `proc/self/cgroup`, and files below `sys/fs/cgroup`."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(groups)
    for name, text in files.items():
        path = root / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def test_without_control_groups_it_is_the_machine(tmp_path: Path) -> None:
    assert memory_bytes(tmp_path) == MACHINE
    assert cpus(tmp_path) == HERE


def test_version_2_in_a_container(tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", {"memory.max": 1 << 28, "cpu.max": "50000 100000"})
    assert memory_bytes(root) == 1 << 28
    assert cpus(root) == 0.5


def test_version_2_takes_the_tightest_of_all_groups_above(tmp_path: Path) -> None:
    files = {"pods/a/memory.max": "max", "pods/memory.max": 3 << 28, "memory.max": "max"}
    quotas = {"pods/a/cpu.max": "max 100000", "pods/cpu.max": "25000 100000"}
    root = tree(tmp_path, "0::/pods/a\n", files | quotas)
    assert memory_bytes(root) == 3 << 28
    assert cpus(root) == 0.25


def test_version_1_with_the_hosts_path_in_a_container(tmp_path: Path) -> None:
    """The path is the host's, and is not there: the mount's top is the container's group."""
    groups = "5:cpu,cpuacct:/docker/f00\n4:memory:/docker/f00\n0::/docker/f00\n"
    quota = {"cpu,cpuacct/cpu.cfs_quota_us": 75_000, "cpu,cpuacct/cpu.cfs_period_us": 100_000}
    root = tree(tmp_path, groups, {"memory/memory.limit_in_bytes": 1 << 29} | quota)
    assert memory_bytes(root) == 1 << 29
    assert cpus(root) == 0.75


def test_version_1_without_limits(tmp_path: Path) -> None:
    files = {"memory/memory.limit_in_bytes": 9223372036854771712, "cpu/cpu.cfs_quota_us": -1}
    root = tree(tmp_path, "4:memory:/\n5:cpu:/\n", files | {"cpu/cpu.cfs_period_us": 100_000})
    assert memory_bytes(root) == MACHINE
    assert cpus(root) == HERE


def test_the_planner_plans_for_the_container(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    root = tree(tmp_path, "0::/\n", {"memory.max": 1 << 30})
    monkeypatch.setattr(topology, "memory_bytes", lambda: memory_bytes(root))
    assert [host.memory_bytes for host in Topology.of_this_machine(4).hosts] == [1 << 28]
