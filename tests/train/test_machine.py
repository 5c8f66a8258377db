"""What ranks say of their hosts becomes the planner's topology; measured speeds reach it from config or storage."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from rayrec.distributed.planner.machine.calibration import CALIBRATION_VERSION
from rayrec.train import TrainError, parse_config
from rayrec.train.setup import build
from rayrec.train.worker.machine import Machine, planned_for, ranks_by_host, topology_of
from tests.ranks import on_ranks
from tests.train.small import learner_of, make_job, rank_session, raw_config, write_all

GIB = 1 << 30


def machine(node: str, gib: int, gpu: str | None = None, gpu_gib: int = 0) -> Machine:
    return Machine(node=node, name=node, memory_bytes=gib * GIB, cpus=8, gpu=gpu, gpu_bytes=gpu_gib * GIB)


def test_unequal_hosts_are_planned_for_as_they_are() -> None:
    topology = topology_of([machine("a", 8)] * 2 + [machine("b", 64)] * 4)
    facts = [(host.first_rank, host.num_ranks, host.memory_bytes) for host in topology.hosts]
    assert facts == [(0, 2, 4 * GIB), (2, 4, 16 * GIB)]


def test_gpus_have_the_least_memory_of_their_host() -> None:
    name = "NVIDIA H100 80GB HBM3"
    topology = topology_of([machine("a", 512, name, 80), machine("a", 512, name, 79), machine("b", 256, name, 40)])
    other, newer = (topology_of([machine("c", 64, gpu, 80)]).device for gpu in ("NVIDIA H100 PCIe", "NVIDIA B200"))
    assert topology.compute_device == "cuda" and topology.device == other != newer
    assert [host.memory_bytes // GIB for host in topology.hosts] == [79, 40]
    assert [host.host_bytes // GIB for host in topology.hosts] == [256, 256]


def test_a_host_whose_ranks_are_scattered_shares_its_memory_all_the_same() -> None:
    machines = [machine("a", 8), machine("b", 8), machine("a", 8)]
    assert ranks_by_host(machines) == [[0], [1], [2]]
    assert [host.memory_bytes // GIB for host in topology_of(machines).hosts] == [4, 8, 4]


def plan_among(group: dist.ProcessGroup, folder: Path, nodes: list[str]) -> tuple[int | None, dict[str, object]]:
    raw = raw_config(folder)
    raw["sharding"] = {"constraints": {"user": {"sharding_types": ["row_wise"]}}}
    job = make_job(raw)
    here = machine(nodes[group.rank()], 4)
    session = rank_session(group)
    session = replace(session, machines=tuple(session.control.gather(here)))
    plan = learner_of(job, session).decision.plan
    return session.env.local_world_size, planned_for(plan, session.machines, job.calibration)


@pytest.mark.parametrize(
    ("nodes", "local", "words"),
    [
        ("aaaa", [4] * 4, "they share a host"),
        ("aabb", [2] * 4, "added inside each host before they cross to another, where that saves enough: user"),
        ("abbb", [1, 3, 3, 3], "unequal numbers of them (1, 3)"),
    ],
)
def test_ranks_know_their_host_and_the_run_says_how_vectors_cross(
    tmp_path: Path, nodes: str, local: list[int], words: str
) -> None:
    write_all(tmp_path, rows=64)
    told = on_ranks(4, plan_among, tmp_path, list(nodes))
    assert [own for own, _ in told] == local
    planned = told[0][1]
    assert words in str(planned["exchange"])
    assert sum(host["ranks"] for host in planned["hosts"]) == 4  # type: ignore[attr-defined]
    assert planned["speeds"] == "presets"


def calibration_file(path: Path, kind: str = "cpu", **speeds: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"version": CALIBRATION_VERSION, "compute_device": kind, "measured": speeds}))
    return path


def test_a_calibration_is_named_or_found_where_runs_are_kept(tmp_path: Path) -> None:
    raw = raw_config(tmp_path) | {"storage": {"path": str(tmp_path / "runs")}}
    assert build.calibration(parse_config(raw)) is None
    calibration_file(tmp_path / "runs/calibration.json", inter_host_bw=7.0)
    found = build.calibration(parse_config(raw))
    assert found is not None and found.speeds == {"inter_host_bw": 7.0}
    calibration_file(tmp_path / "mine.json", inter_host_bw=9.0)
    raw["sharding"] = {"calibration": str(tmp_path / "mine.json")}
    named = build.calibration(parse_config(raw))
    assert named is not None and named.speeds == {"inter_host_bw": 9.0}
    hosts = [machine("a", 8), machine("b", 8)]
    assert topology_of(hosts, named).device == replace(topology_of(hosts).device, inter_host_bw=9.0)


def test_a_wrong_calibration_is_refused_with_its_file(tmp_path: Path) -> None:
    raw = raw_config(tmp_path) | {"sharding": {"calibration": str(tmp_path / "none.json")}}
    with pytest.raises(TrainError, match=r"sharding.calibration: .*none\.json: not a calibration file"):
        build.calibration(parse_config(raw))
    calibration_file(tmp_path / "none.json", kind="cuda", inter_host_bw=9.0)
    cuda = build.calibration(parse_config(raw))
    with pytest.raises(ValueError, match=r"none\.json: measured on cuda, but the ranks have cpu"):
        topology_of([machine("a", 8)], cuda)
    calibration_file(tmp_path / "none.json", inter_host_bw=-1)
    with pytest.raises(TrainError, match="inter_host_bw=-1 must be positive"):
        build.calibration(parse_config(raw))
