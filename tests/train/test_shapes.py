"""One config on several clusters, without a cluster: what fits, what is missing, the bottleneck; and `simulate.py`."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from rayrec.cli import run
from rayrec.train import parse_config
from rayrec.train.planning.shapes import Shape, compare, shapes_table
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


def test_a_cluster_fits_or_says_what_would(tmp_path: Path) -> None:
    config = parse_config(big(tmp_path))
    small, large = compare(config, ["1x1", "2x8"], "h100")
    assert small.step_s is None and small.problem is not None and "2 ranks" in small.problem
    assert large.step_s is not None and large.memory_bytes is not None
    assert 400_000_000 * 128 * 4 / 16 < large.memory_bytes < 80 * 2**30
    assert large.parts_s is not None and sum(large.parts_s.values()) == pytest.approx(large.step_s)
    assert large.samples_per_s == 8192 / large.step_s


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
        (shape,) = compare(parse_config(raw), ["2x1"], "h200")
        assert shape.step_s is not None
        return shape.step_s

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


def test_the_table_of_clusters_by_hand() -> None:
    fits = Shape(
        world="2x8", ranks=16, batch_size=8192, step_s=0.004096, binds="lookup", memory_bytes=1.5 * 2**30,
        memory_there=8 * 2**30,
    )  # fmt: skip
    short = Shape(world="1x1", ranks=1, batch_size=1024, problem="first line\nsecond")
    assert (fits.samples_per_s, short.samples_per_s) == (2e6, None)
    assert fits.to_dict()["samples_per_s"] == 2e6 and short.to_dict()["problem"] == "first line\nsecond"
    out = io.StringIO()
    Console(file=out, width=150).print(shapes_table([fits, short], "h100"))
    shown = [re.split("[│┃]", line)[1:-1] for line in out.getvalue().splitlines()]
    rows = [[cell.strip() for cell in line] for line in shown if line]
    assert rows == [
        ["world", "rows a step", "step", "rows/s", "fullest rank", "binds"],
        ["2x8", "8,192", "4.10 ms", "2,000,000", "1.5 GiB of 8.0 GiB", "lookup"],
        ["1x1", "1,024", "–", "–", "–", "does not fit: first line"],
    ]


def test_a_cluster_has_a_row_for_each_rank_at_least() -> None:
    config = parse_config(raw_config(Path("/nowhere"), trainer__batch_size=6, trainer__num_workers=4))
    assert [shape.batch_size for shape in compare(config, ["2", "4", "2x4"], "h100")] == [6, 6, 8]
    assert [shape.batch_size for shape in compare(config, ["1", "3", "2x4"], "h100", "weak")] == [2, 4, 12]
    alone = parse_config(raw_config(Path("/nowhere"), trainer__batch_size=6))
    assert [shape.batch_size for shape in compare(alone, ["2"], "h100", "weak")] == [12]
