"""One config on several clusters, without a cluster: what fits, what is missing, the bottleneck; and `simulate.py`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from rayrec.cli import run
from rayrec.distributed.planner import Topology
from rayrec.train import parse_config
from rayrec.train.planning.plan_only import make_groups
from rayrec.train.planning.shapes import compare
from tests.train.small import raw_config

ROOT = Path(__file__).resolve().parents[2]


def big(folder: Path) -> dict[str, Any]:
    """A model whose tables take 205 GB and some, more than an H100 has."""
    raw = raw_config(folder, trainer__batch_size=8192, trainer__num_workers=8)
    raw["tables"][0] |= {"rows": 400_000_000, "dim": 128}
    for table in raw["tables"]:
        table["dim"] = 128
    raw["model"]["args"]["dense_arch"] = [16, 128]
    return raw


def test_each_cluster_is_what_the_planner_says_of_it(tmp_path: Path) -> None:
    config = parse_config(big(tmp_path))
    small, large = compare(config, ["1x1", "2x8"], "h100")
    assert small.step_s is None and small.problem is not None and "2 ranks" in small.problem
    result = make_groups(config, Topology.from_world("2x8", gpu="h100")).result
    assert large.step_s == result.estimate.worst_s
    assert large.memory_bytes == max(result.estimate.device_bytes_R)
    assert large.parts_s is not None and sum(large.parts_s.values()) == pytest.approx(large.step_s)
    assert large.samples_per_s == 8192 / result.estimate.worst_s


def test_weak_scaling_keeps_the_rows_of_a_worker(tmp_path: Path) -> None:
    config = parse_config(big(tmp_path))
    assert [shape.batch_size for shape in compare(config, ["1x8", "4x8"], "h100", "weak")] == [8192, 32_768]
    assert [shape.batch_size for shape in compare(config, ["1x8", "4x8"], "h100", "strong")] == [8192, 8192]


def test_the_command_compares_clusters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(big(tmp_path)))
    assert run(["plan", str(path), "--world", "1x1,2x8", "--gpu", "h100"]) == 0
    shown = capsys.readouterr().out
    assert "2x8" in shown and "does not fit" in shown and "1x1: " in shown
    assert run(["plan", str(path), "--world", "1x1,2x8", "--save", str(tmp_path / "plan.json")]) == 1


@pytest.mark.slow
def test_the_job_writes_a_page_and_figures_up_to_4096_ranks(tmp_path: Path) -> None:
    raw = big(tmp_path)
    raw["tables"][0]["name"] = "<b>user"
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(raw))
    files = ["--json", str(tmp_path / "out.json"), "--html", str(tmp_path / "out.html")]
    command = [
        sys.executable,
        "jobs/experiments/simulate.py",
        "--config",
        str(path),
        "--worlds",
        "1x1,4x8,512x8",
        *files,
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = json.loads((tmp_path / "out.json").read_text())
    assert [shape["ranks"] for shape in told["weak"]] == [1, 32, 4096]
    assert told["strong"][0]["problem"] and told["strong"][2]["step_s"] > 0
    page = (tmp_path / "out.html").read_text()
    assert "<b>user" not in page and "http" not in page


def test_groups_cost_what_the_planner_says_of_them(tmp_path: Path) -> None:
    raw = big(tmp_path) | {"sharding": {"replicas": 2, "sync_every": 10}}
    (shape,) = compare(parse_config(raw), ["4x8"], "h100")
    assert (shape.replicas, shape.ranks) == (2, 32) and shape.parts_s is not None
    assert shape.parts_s["between groups"] > 0 and sum(shape.parts_s.values()) == pytest.approx(shape.step_s)


def test_a_plan_is_for_the_rank_with_the_most_rows(tmp_path: Path) -> None:
    def seconds(batch_size: int) -> float:
        raw = big(tmp_path)
        raw["trainer"] |= {"batch_size": batch_size, "num_workers": 2}
        return make_groups(parse_config(raw), Topology.from_world("2x1", gpu="h200")).result.estimate.worst_s

    assert seconds(4096) < seconds(4097) == seconds(4098)


@pytest.mark.slow
def test_published_speeds_are_within_the_bounds(tmp_path: Path) -> None:
    """A bound that somebody has passed would be wrong."""
    out = tmp_path / "mlperf.json"
    command = [sys.executable, "jobs/experiments/simulate.py", "--mlperf", "--worlds", "1x8,2x8", "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())
    assert [shape["world"] for shape in told["weak"]] == ["1x8", "2x8"]
    assert told["weak"][0]["bound_samples_per_s"] == told["strong"][0]["bound_samples_per_s"]
    assert all(0 < one["reached"] <= 1 for one in told["published"]), told["published"]
