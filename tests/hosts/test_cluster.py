"""The training job on a Ray cluster of several hosts, each a network namespace with an address of its own."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from tests.hosts.ray_hosts import DASHBOARD, RAY, ROOT, RayHosts, ray_hosts
from tests.ranks import on_ranks
from tests.train.small import fit_on_rank, raw_config, write_all

pytestmark = [pytest.mark.long(minutes=5), pytest.mark.timeout(1500)]
CUTS = {
    "user": {"sharding_types": ["row_wise"]},
    "item": {"sharding_types": ["table_row_wise"]},
    "tag": {"sharding_types": ["grid_shard"], "min_partition": 4},
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[RayHosts]:
    """A head and three hosts of two CPUs; four ranks need two of them."""
    with ray_hosts(3) as hosts:
        yield hosts


def config_file(folder: Path, **changes: Any) -> tuple[Path, dict[str, Any]]:
    raw = raw_config(folder, **{"trainer__num_workers": 4, "trainer__cpus_per_worker": 1.0, **changes})
    raw["sharding"] = {"constraints": CUTS}
    # under column cuts row-wise state is another, by design: hosts cut the grid otherwise than one host
    raw["optimizers"]["sparse"]["kind"] = "adagrad"
    return written(raw), raw


def written(raw: dict[str, Any]) -> Path:
    """The file of a config, beside its data."""
    path = Path(raw["data"]["train"]).with_name(f"{raw['name']}.yaml")
    path.write_text(yaml.safe_dump(raw))
    return path


def json_lines(folder: Path) -> Path:
    """A folder of a text file with the rows that are evaluated."""
    (lines := folder / "lines").mkdir()
    rows = pq.read_table(folder / "eval").to_pylist()
    (lines / "x.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return lines


def records(folder: Path, kind: str) -> list[dict[str, Any]]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def test_a_wrong_token_is_refused(cluster: RayHosts) -> None:
    """Who has none is met in `test_documented_commands.py`."""
    own = cluster.on_head(RAY, "job", "list", "--address", DASHBOARD)
    wrong = cluster.on_head(RAY, "job", "list", "--address", DASHBOARD, RAY_AUTH_TOKEN="0" * 64)
    assert own.returncode == 0 and wrong.returncode != 0, own.stdout + own.stderr


def test_a_run_on_two_hosts_is_the_run_on_one(cluster: RayHosts, tmp_path: Path) -> None:
    """Tables cut row-wise, row-wise on a host, and as a grid, under the hierarchical exchange. All hosts see the
    Parquet files that were made of the rows that are evaluated."""
    write_all(tmp_path)
    path, raw = config_file(tmp_path)
    words = ["jobs/train.py", "--config", str(path), "--set", f"data.eval={json_lines(tmp_path)}"]
    done = cluster.on_head(*cluster.submission(*words), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr + cluster.lab.logs()
    run = tmp_path / "runs" / "small"
    plan = json.loads((run / "plan.json").read_text())
    kinds = {name: sharding["sharding_type"] for name, sharding in next(iter(plan["plan"].values())).items()}
    assert kinds == {"user": "row_wise", "item": "table_row_wise", "tag": "grid_shard"}
    assert [host["ranks"] for host in plan["planned_for"]["hosts"]] == [2, 2]
    addresses = {host.address for host in cluster.lab.hosts[1:]}
    assert {host["name"] for host in plan["planned_for"]["hosts"]} < addresses
    assert "added inside each host" in plan["planned_for"]["exchange"]
    result = json.loads((run / "result.json").read_text())
    raw["name"] = "one-host"
    alone = on_ranks(4, fit_on_rank, raw, timeout_s=400)[0]
    for figure in ("auc", "logloss", "ne"):
        assert result["eval"][figure] == pytest.approx(alone["eval"][figure], abs=1e-5), figure
    assert result["train"]["loss"] == pytest.approx(alone["train"]["loss"], abs=1e-5)
    assert (result["steps"], result["train"]["samples"]) == (alone["steps"], 2000)


def test_what_became_parquet_must_be_seen_by_all_hosts(cluster: RayHosts, tmp_path: Path) -> None:
    """A folder for temporary files is each host's own: refused by name before a worker starts. The run above has one
    that all see."""
    write_all(tmp_path)
    path, _ = config_file(tmp_path, name="lines", trainer__epochs=1)
    lines = json_lines(tmp_path)
    words = ["jobs/train.py", "--config", str(path), "--set", f"data.train={lines}", "--set", f"data.eval={lines}"]
    own = cluster.lab.folder / "tmp" / "runs"
    done = cluster.on_head(*cluster.submission(*words, "--set", f"storage.path={own}"), timeout_s=600)
    told = " ".join((done.stdout + done.stderr).split())
    hosts = ", ".join(sorted(host.address for host in cluster.lab.hosts[1:]))
    found = re.search(rf"storage.path: \d+ nodes ([\d., ]+) of the Ray cluster cannot read {own}/lines/converted", told)
    assert done.returncode and found and ", ".join(sorted(found[1].split(", "))) == hosts, told
    assert "rayrec data convert" in told and "Starting 4 workers" not in told


def test_a_host_is_cut_off_and_the_run_goes_on_then_grows(cluster: RayHosts, tmp_path: Path) -> None:
    """A worker on each of two hosts, then on all three."""
    write_all(tmp_path)
    trainer = {"num_workers": 2, "cpus_per_worker": 2.0, "epochs": 20, "hang_s": 60}
    path, _ = config_file(tmp_path, name="cut", **{f"trainer__{name}": value for name, value in trainer.items()})
    run = tmp_path / "runs" / "cut"
    job = cluster.lab.start(
        cluster.head, ["env", "-C", str(ROOT), *cluster.submission("jobs/train.py", "--config", str(path))],
        cluster.environment, "job.log",
    )  # fmt: skip
    lost = None
    try:
        until = time.monotonic() + 300
        while not any(event["event"] == "checkpoint" for event in records(run, "event")):
            assert job.poll() is None and time.monotonic() < until, cluster.lab.logs()
            time.sleep(0.1)
        used = {host["name"] for host in json.loads((run / "plan.json").read_text())["planned_for"]["hosts"]}
        lost = next(host for host in cluster.lab.hosts[1:] if host.address in used)
        lost.link("down")
        job.wait(500)
    except subprocess.TimeoutExpired:
        pytest.fail(f"the job does not end\n{cluster.lab.logs()}")
    finally:
        if lost is not None:
            lost.link("up")
    assert job.returncode == 0, cluster.lab.logs()
    result = json.loads((run / "result.json").read_text())
    assert (result["recoveries"], result["epochs"], result["train"]["samples"]) == (1, 20, 20_000)
    assert lost.address not in {h["name"] for h in json.loads((run / "plan.json").read_text())["planned_for"]["hosts"]}

    cluster.join(lost, 2)  # the host comes back, and the job is submitted again for more ranks
    cluster.await_nodes(4)
    more = ["--set", "trainer.num_workers=3", "--set", "trainer.epochs=21"]
    done = cluster.on_head(*cluster.submission("jobs/train.py", "--config", str(path), *more), timeout_s=600)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((run / "result.json").read_text())
    assert (result["world_size"], result["epochs"], result["train"]["samples"]) == (3, 21, 21_000)
    assert any(event["event"] == "resumed" for event in records(run, "event"))
