"""The guides' commands, Python and configs run as they stand, in an empty folder."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import threading
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from rayrec import cli
from rayrec.inference import ItemIndex
from rayrec.train import RunFolder, parse_config
from tests.cli.test_init import ratings
from tests.test_readme import ROOT, blocks

# The least AUC of each label.
GUIDES = {
    "dynamic-ids": {"": 0.6},
    "histories": {"": 0.85},
    "entities": {"": 0.85},
    "events": {"": 0.8},
    "several-tasks": {"click": 0.75, "buy": 0.7},
}
OTHERS = {
    "dynamic-ids": [],
    "entities": [],
    "events": [],
    "histories": [
        {"name": "bst", "args": {"over_arch": [64, 32, 1], "max_length": 30, "heads": 2}},
        {"name": "din", "args": {"over_arch": [64, 32, 1], "attention": []}},
    ],
    "several-tasks": [
        {"name": "ple", "args": {"own": 1, "shared": 2, "levels": 1}},
        {"name": "mmoe", "args": {"experts": 1}},
        {"name": "esmm", "args": {"tower": [64, 32]}},
    ],
}


def run(line: str) -> None:
    assert cli.run(shlex.split(line, comments=True)[1:]) == 0, line


def interrupt_in_training(folder: RunFolder) -> threading.Thread:
    """Sends this process Ctrl-C when the run has logged its first steps."""

    def wait() -> None:
        while not any(record["kind"] == "train" for record in folder.read_metrics()):
            time.sleep(0.002)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


def test_the_five_commands_work_as_they_stand_with_the_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ratings(tmp_path / "ratings.csv.gz", rows=6000)
    (shell,) = blocks("bash", ROOT / "docs" / "guides" / "first-model.md")
    init, train, same, *rest, serve = [shlex.split(line, comments=True) for line in shell.splitlines()]
    assert train == same and serve[1] == "serve"
    folder = RunFolder(Path("runs/ratings"))
    run(shlex.join(init))
    thread = interrupt_in_training(folder)
    assert cli.run(train[1:]) != 0
    thread.join()
    assert not folder.result.exists()
    for line in (same, *rest):
        run(shlex.join(line))
    events = [record.get("event") for record in folder.read_metrics()]
    assert "interrupted" in events and Path("exports/ratings/parity.json").exists()


def aucs(run_name: str) -> dict[str, float]:
    """Of each label, at the best evaluation of the run."""
    evaluation = RunFolder(Path("runs") / run_name).read_metrics()
    best = max((record for record in evaluation if record["kind"] == "eval"), key=lambda record: record["auc"])
    tasks = best.get("tasks", {"": best})
    return {name: of["auc"] for name, of in tasks.items()}


@pytest.mark.long
def test_the_guide_of_retrieval_works_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "guides" / "retrieval.md"
    (source,), (config, features), shells = (blocks(kind, page) for kind in ("python", "yaml", "bash"))
    raw = yaml.safe_load(features)
    raw["tables"] += [{"name": name, "rows": 9, "dim": 32, "features": [name]} for name in ("user", "film")]
    parse_config({**raw, "name": "features", "data": {**raw["data"], "train": "rows"}})
    exec(compile(source, page.name, "exec"), {})
    Path("retrieval.yaml").write_text(config)
    new_items = {"item": ["film-new"], "shop": ["a"], "vector": [[0.1] * 32]}
    pq.write_table(pa.table(new_items), "new-items.parquet")
    for shell in shells:
        for line in shell.splitlines():
            run(line)
    assert ItemIndex("index/3").items["item"].to_pylist()[-1] == "film-new"
    evaluations = [record for record in RunFolder(Path("runs/retrieval")).read_metrics() if record["kind"] == "eval"]
    best = max(evaluations, key=lambda record: record["mrr"])
    assert best["recall@10"] > 0.7 > 5 * best["popularity"]["recall@10"], best
    found = pa.concat_tables([pq.read_table(path) for path in sorted(Path("found").glob("*.parquet"))])
    assert found.num_rows == best["samples"] == 1000


@pytest.mark.long
def test_the_guide_of_time_order_works_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "guides" / "time-order.md"
    (source,), (config, vary), shells = (blocks(kind, page) for kind in ("python", "yaml", "bash"))
    exec(compile(source, page.name, "exec"), {})
    Path("time.yaml").write_text(config)
    Path("vary.yaml").write_text(vary)
    for line in "".join(shells).splitlines():
        run(line)
    worth = {one["name"]: one for one in json.loads(Path("runs/time-worth/worth.json").read_text())["variants"]}
    chance, hashed = worth["seed"]["difference"], worth["users hashed"]
    assert hashed["difference"] > 3 * hashed["error"] > 0 and hashed["difference"] > 2 * abs(chance), worth
    told = [record for record in RunFolder(Path("runs/time")).read_metrics() if record["kind"] == "eval"]
    by_day = {record["window"][:10]: record["auc"] for record in told}
    assert [*by_day] == [f"1970-01-{day:02}" for day in range(2, 31)]
    assert by_day["1970-01-10"] > 0.75 and by_day["1970-01-30"] > 0.75, by_day
    assert all(by_day[f"1970-01-{day}1"] < by_day[f"1970-01-{day}0"] - 0.1 for day in (1, 2)), "tastes changed"


@pytest.mark.long
def test_the_guide_of_live_data_works_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "guides" / "live.md"
    (source,), (config,), (shell,) = (blocks(kind, page) for kind in ("python", "yaml", "bash"))
    exec(compile(source, page.name, "exec"), {})
    Path("live.yaml").write_text(config)
    for line in shell.splitlines():
        run(line)
    joined = sum(pq.read_metadata(path).num_rows for path in Path("joined").glob("*.parquet"))
    told = [record for record in RunFolder(Path("runs/live")).read_metrics() if record["kind"] == "train"]
    assert told[-1]["samples"] == joined > 6000
    assert max(record["auc"] or 0 for record in told) > 0.7
    assert told[-1]["watermark"] > "1970-01-02" and told[-1]["late_rows"] == 0


@pytest.mark.long
@pytest.mark.parametrize("name", GUIDES)
def test_a_guide_works_as_it_stands(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs" / "guides" / f"{name}.md"
    (source,), (config,), (shell,) = (blocks(kind, page) for kind in ("python", "yaml", "bash"))
    exec(compile(source, page.name, "exec"), {})
    lines = shell.splitlines()
    (file,) = re.findall(r"^rayrec train (\S+)$", shell, re.MULTILINE)
    Path(file).write_text(config)
    for line in lines:
        run(line)
    raw = yaml.safe_load(config)
    found = aucs(raw["name"])
    assert all(found[label] > least for label, least in GUIDES[name].items()), found
    (test,) = re.findall(r"--data (\S+)", shell)
    rows = sum(pq.read_metadata(path).num_rows for path in Path(test).glob("*.parquet"))
    assert sum(pq.read_metadata(path).num_rows for path in sorted(Path("scores").glob("part-*.parquet"))) == rows
    for other in OTHERS[name]:
        args = {key: value for key, value in raw["model"]["args"].items() if key in ("attention", "expert", "tower")}
        args = args if other["name"] != "esmm" else {}
        changed = {**raw, "name": f"{other['name']}-2", "model": {**other, "args": {**args, **other["args"]}}}
        changed["trainer"] = {**raw["trainer"], "epochs": 1}
        if other["name"] == "esmm":
            changed["schema"] = {**raw["schema"], "labels": [{"name": "click"}, {"name": "buy"}]}
        Path("other.yaml").write_text(yaml.safe_dump(changed))
        run("rayrec train other.yaml --fresh")
        assert len(aucs(changed["name"])) == len(found)
