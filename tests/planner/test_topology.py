"""Topologies: sizes, unlike hosts, presets, calibration files, limits of containers, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from rayrec._runtime.cgroup_limits import cpus, memory_bytes
from rayrec.distributed.planner import Topology, plan_tables
from rayrec.distributed.planner.machine.calibration import CALIBRATION_VERSION
from rayrec.distributed.planner.machine.devices import preset_of
from tests.planner.problems import SHARDER, table


def test_world_text_gives_hosts_of_ranks():
    topology = Topology.from_world("16x8", "H100")
    assert (topology.world_size, topology.local_world_size, len(topology.hosts)) == (128, 8, 16)
    assert topology.host_of(17).ranks == range(16, 24)
    assert topology.device == Topology(1, gpu="h100").device
    assert Topology.from_world("4", "cpu").compute_device == "cpu"


def test_a_last_host_may_be_shorter():
    assert [host.num_ranks for host in Topology(10, "cuda", local_world_size=4).hosts] == [4, 4, 2]


def test_large_tables_go_to_the_host_with_more_memory():
    topology = Topology(6, "cuda", hosts=[2, 4], hbm_cap=[80 << 30, 4 << 30])
    result = plan_tables([table("big", 60_000_000, 128)], topology, sharder=SHARDER)
    assert set(result.plan.plan[""]["big"].ranks) <= {0, 1}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Topology(0), "world_size=0 must be at least 1"),
        (lambda: Topology(2, "tpu"), "compute_device='tpu' must be 'cpu' or 'cuda'"),
        (lambda: Topology(2, "cpu", gpu="h100"), "gpu='h100' is a cuda device"),
        (lambda: Topology(2, "cuda", gpu="v100"), "device 'v100' is not known; known: a100_40, "),
        (lambda: Topology(4, hosts=[2, 1]), r"hosts=\[2, 1\] have 3 ranks, but world_size=4"),
        (lambda: Topology(4, hosts=[2, 2], hbm_cap=[1]), "hbm_cap has 1 numbers for 2 hosts"),
        (lambda: Topology(4, hbm_cap=-1), "hbm_cap=-1 must be positive"),
        (lambda: Topology.from_world("2x2x2"), "world '2x2x2' must be HOSTSxRANKS"),
        (lambda: Topology.from_world("0x8"), "world '0x8' must be HOSTSxRANKS"),
        (lambda: Topology.from_world("8by8"), "world '8by8' must be HOSTSxRANKS, as 16x8"),
    ],
)
def test_wrong_topologies_are_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


GOOD = {"version": CALIBRATION_VERSION, "compute_device": "cpu", "measured": {"memory_bw": 7e9, "id_s": 1e-8}}


def test_calibration_file_replaces_speeds(tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps(GOOD))
    topology = Topology.from_calibration(path, 4, local_world_size=2)
    assert (topology.device.memory_bw, topology.device.id_s) == (7e9, 1e-8)
    assert topology.device.table_s == Topology(1, "cpu").device.table_s
    assert len(topology.hosts) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 1}, f"calibration version 1; this rayrec reads {CALIBRATION_VERSION}"),
        ({"measured": {"kind": 1.0}}, r"unknown figures \['kind'\]"),
        ({"measured": {"memory_bytes": 1.0, "host_bytes": 2}}, r"unknown figures \['host_bytes', 'memory_bytes'\]"),
        ({"measured": {"memory_bw": 0}}, "memory_bw=0 must be positive"),
        ({"measured": {"memory_bw": True}}, "memory_bw=True must be positive"),
        ({"measured": {"memory_bw": "1"}}, "memory_bw=1 must be positive"),
        ({"measured": None}, r"not a calibration file .*jobs/calibrate.py"),
        ({"compute_device": "cuda"}, None),
    ],
)
def test_a_calibration_is_figures_or_refused(changes: dict[str, Any], message: str | None, tmp_path: Path) -> None:
    path = tmp_path / "calibration.json"
    path.write_text(json.dumps({**GOOD, **changes}))
    if message is None:
        assert Topology.from_calibration(path, 4).compute_device == "cuda"
        return
    with pytest.raises(ValueError, match=message):
        Topology.from_calibration(path, 4)


@pytest.mark.parametrize(
    ("name", "gib", "memory_tb_s", "nvlink_gb_s", "network_gb_s", "bus_gb_s"),
    [
        ("A100", 40, 1.555, 300, 25, 24),
        ("a100-80", 80, 2.039, 300, 25, 24),
        ("h100", 80, 3.35, 450, 50, 50),
        ("H200", 139, 4.8, 450, 50, 50),
        ("b200", 178, 8.0, 900, 50, 50),
    ],
)
def test_gpus_are_as_in_their_data_sheets(name, gib, memory_tb_s, nvlink_gb_s, network_gb_s, bus_gb_s):
    gpu = Topology(1, gpu=name).device
    assert (gpu.kind, gpu.memory_bytes, gpu.host_bytes) == ("cuda", gib << 30, 192 << 30)
    assert (gpu.memory_bw, gpu.intra_host_bw) == (memory_tb_s * 1e12, nvlink_gb_s * 1e9)
    assert (gpu.inter_host_bw, gpu.host_to_device_bw) == (network_gb_s * 1e9, bus_gb_s * 1e9)


def test_a_gpu_is_known_by_what_it_calls_itself():
    assert preset_of("NVIDIA H100 80GB HBM3") == "h100"
    assert preset_of("NVIDIA A100-SXM4-40GB") == "a100"
    assert preset_of("Tesla T4") is None


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


def test_the_planner_shares_this_machines_memory_out() -> None:
    """Of its control group, where that has less."""
    topology = Topology.of_this_machine(4)
    held = [host.host_bytes if topology.compute_device == "cuda" else host.memory_bytes for host in topology.hosts]
    assert held == [memory_bytes() // 4]
