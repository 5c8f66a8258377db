"""Topologies: sizes, unlike hosts, presets, calibration files, and what is refused."""

from __future__ import annotations

import json

import pytest

from rayrec.distributed.planner import Topology, plan_tables
from rayrec.distributed.planner.machine.calibration import CALIBRATION_VERSION
from rayrec.distributed.planner.machine.devices import DEVICES, device, preset_of
from rayrec.torchrec.distributed.planner import topology as torchrecs
from tests.planner.problems import SHARDER, table


def test_world_text_gives_hosts_of_ranks():
    topology = Topology.from_world("16x8", "H100")
    assert (topology.world_size, topology.local_world_size, len(topology.hosts)) == (128, 8, 16)
    assert topology.host_of(17).ranks == range(16, 24)
    assert topology.device == DEVICES["h100"]
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
        (lambda: torchrecs.Topology(4, inter_host_bw=0.0), "inter_host_bw=0.0 must be positive"),
        (lambda: Topology.from_world("2x2x2"), "world '2x2x2' must be HOSTSxRANKS"),
        (lambda: Topology.from_world("0x8"), "world '0x8' must be HOSTSxRANKS"),
        (lambda: Topology.from_world("8by8"), "world '8by8' must be HOSTSxRANKS, as 16x8"),
    ],
)
def test_wrong_topologies_are_refused(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_calibration_file_replaces_speeds(tmp_path):
    path = tmp_path / "calibration.json"
    data = {"version": CALIBRATION_VERSION, "compute_device": "cpu", "measured": {"memory_bw": 7e9, "id_s": 1e-8}}
    path.write_text(json.dumps(data))
    topology = Topology.from_calibration(path, 4, local_world_size=2)
    assert (topology.device.memory_bw, topology.device.id_s) == (7e9, 1e-8)
    assert topology.device.table_s == DEVICES["cpu"].table_s
    assert len(topology.hosts) == 2
    path.write_text(json.dumps(data | {"measured": {"speed": 1}}))
    with pytest.raises(ValueError, match=r"unknown figures \['speed'\]"):
        Topology.from_calibration(path, 4)
    path.write_text("{}")
    with pytest.raises(ValueError, match=r"not a calibration file .*jobs/calibrate.py"):
        Topology.from_calibration(path, 4)


def test_this_machine_has_memory():
    topology = Topology.of_this_machine(2)
    assert topology.hosts[0].memory_bytes > 1 << 28


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
    gpu = device(name)
    assert (gpu.kind, gpu.memory_bytes, gpu.host_bytes) == ("cuda", gib << 30, 192 << 30)
    assert (gpu.memory_bw, gpu.intra_host_bw) == (memory_tb_s * 1e12, nvlink_gb_s * 1e9)
    assert (gpu.inter_host_bw, gpu.host_to_device_bw) == (network_gb_s * 1e9, bus_gb_s * 1e9)


def test_a_gpu_is_known_by_what_it_calls_itself():
    assert preset_of("NVIDIA H100 80GB HBM3") == "h100"
    assert preset_of("NVIDIA A100-SXM4-40GB") == "a100"
    assert preset_of("Tesla T4") is None
