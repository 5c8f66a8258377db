"""Attacks by files: YAML with tags, run folders that name code, paths that lead out, markup in names and values."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from rich.console import Console

from rayrec.cli import run
from rayrec.distributed import ShardingPlan
from rayrec.train import (
    ConfigError,
    Display,
    Trainer,
    TrainError,
    evaluate_run,
    export_run,
    load_config,
    parse_config,
    write_report,
)
from tests.train.small import make_job, raw_config, write_all

MARKUP = "<script>alert(1)</script>[red]\x1b[2J"


@pytest.mark.parametrize(
    "text",
    [
        "name: !!python/object/apply:os.system ['touch {mark}']",
        "name: !!python/name:os.system ''",
        "model: !!python/object/new:subprocess.Popen [['touch', '{mark}']]",
    ],
)
def test_yaml_makes_no_objects(tmp_path: Path, text: str) -> None:
    mark = tmp_path / "mark"
    path = tmp_path / "train.yaml"
    path.write_text(text.format(mark=mark))
    with pytest.raises(ConfigError, match=r"not YAML.*could not determine a constructor"):
        load_config(path)
    with pytest.raises(ConfigError, match="not YAML"):
        load_config(write_config(tmp_path), [f"name={text.format(mark=mark).split(': ', 1)[1]}"])
    assert not mark.exists()


def write_config(folder: Path) -> Path:
    path = folder / "good.yaml"
    path.write_text(yaml.safe_dump(raw_config(folder)))
    return path


def run_that_names(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A run folder whose config names a module in the working folder, and what that module would leave."""
    write_all(folder, rows=64)
    raw = raw_config(folder, trainer__epochs=1)
    Trainer(parse_config(raw)).fit()
    run_folder = folder / "runs" / "small"
    kept = yaml.safe_load((run_folder / "config.yaml").read_text())
    kept["model"] = {"factory": "planted_by_somebody:make", "args": kept["model"]["args"]}
    (run_folder / "config.yaml").write_text(yaml.safe_dump(kept))
    mark = folder / "mark"
    (folder / "planted_by_somebody.py").write_text(f"import pathlib\npathlib.Path({str(mark)!r}).write_text('ran')\n")
    monkeypatch.chdir(folder)
    monkeypatch.syspath_prepend(str(folder))
    return run_folder, mark


def test_code_that_a_run_folder_names_runs_only_where_it_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_folder, mark = run_that_names(tmp_path, monkeypatch)
    for read in (lambda: evaluate_run(run_folder), lambda: export_run(run_folder, tmp_path / "model")):
        with pytest.raises(TrainError, match=r"planted_by_somebody:make, which would be imported.*--allow-code"):
            read()
    assert run(["evaluate", str(run_folder)]) != 0
    assert run(["export", str(run_folder), str(tmp_path / "model")]) != 0
    assert not mark.exists()
    with pytest.raises(TrainError, match="has no function 'make'"):
        evaluate_run(run_folder, allow_code=True)
    assert mark.exists()


def test_a_job_imports_only_what_was_submitted_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    elsewhere, job = tmp_path / "site", tmp_path / "_ray_pkg_0123" / "job"
    for folder, name in ((elsewhere, "planted_on_the_node"), (job, "submitted_with_the_job")):
        folder.mkdir(parents=True)
        (folder / f"{name}.py").write_text(
            f"import pathlib\npathlib.Path({str(tmp_path / name)!r}).touch()\nmake = dict\n"
        )
    monkeypatch.syspath_prepend(str(elsewhere))
    monkeypatch.chdir(job)
    write_all(tmp_path, rows=64)

    def fit(module: str, **allowed: bool) -> None:
        Trainer(parse_config(raw_config(tmp_path, model={"factory": f"{module}:make"})), **allowed).fit()

    with pytest.raises(TrainError, match=r"planted_on_the_node.*is not in the job's working folder.*--allow-code"):
        fit("planted_on_the_node")
    with pytest.raises(TrainError, match="is not in the job's working folder"):
        fit("os.path")
    assert not (tmp_path / "planted_on_the_node").exists()
    for module, allowed in (("planted_on_the_node", {"allow_code": True}), ("submitted_with_the_job", {})):
        with pytest.raises(TrainError, match="returned dict"):
            fit(module, **allowed)
        assert (tmp_path / module).exists()


@pytest.mark.parametrize("path", ["../../../../../etc/passwd", "/etc/shadow", "/proc/self/environ", "/dev/zero"])
def test_a_file_that_is_no_plan_is_refused_without_what_is_in_it(tmp_path: Path, path: str) -> None:
    write_all(tmp_path, rows=64)
    with pytest.raises(ValueError, match=r"sharding\.plan") as caught:
        Trainer(parse_config(raw_config(tmp_path, sharding={"plan": path}))).fit()
    assert "root:" not in str(caught.value) and "PATH=" not in str(caught.value)


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/b", "..", ".hidden", "a\x00b", "a b", "<b>"])
def test_a_runs_name_is_one_folder(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match="name"):
        parse_config(raw_config(tmp_path) | {"name": name})


def a_plan(**changes: Any) -> dict[str, Any]:
    shard = {"table": "t", "shard_offsets": [0, 0], "shard_sizes": [4, 4], "placement": "rank:0/cpu"} | changes
    sharding = {"sharding_type": "table_wise", "compute_kernel": "fused", "ranks": [0], "shards": [shard]}
    return {"plan": {"": {"t": sharding}}}


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['true']",
        '{"plan": "../../etc/passwd"}',
        json.dumps(a_plan(shard_sizes=[10**30, 4])),
        json.dumps(a_plan(shard_offsets=[-1, 0])),
        "[" * 100_000,
    ],
)
def test_a_plan_is_data_or_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ShardingPlan.from_json(text)


def test_names_and_values_are_text_in_the_report_and_on_the_terminal(tmp_path: Path) -> None:
    write_all(tmp_path, rows=64)
    raw = raw_config(tmp_path, trainer__epochs=1)
    raw["tables"][0]["name"] = MARKUP
    job = make_job(raw)
    job.files.path.mkdir(parents=True)
    shown = io.StringIO()
    plan = json.loads(json.dumps({"plan": {"": {}}}))
    plan["planned_for"] = {
        "hosts": [{"name": MARKUP, "ranks": 1, "cpus": 1.0, "memory_bytes": 1, "gpu": MARKUP}],
        "speeds": MARKUP,
        "exchange": MARKUP,
    }
    Display(Console(file=shown, width=200)).plan(plan)
    assert "<script>" in shown.getvalue() and "[red]" in shown.getvalue()
    assert "\x1b[2J" not in shown.getvalue(), "a name clears the screen"
    assert r"\x1b[2J" in shown.getvalue()
    (job.files.path / "config.yaml").write_text(yaml.safe_dump(job.config.to_dict()))
    (job.files.path / "metrics.jsonl").write_text(
        json.dumps({"kind": "event", "time": 0, "step": 1, "attempt": 1, "event": MARKUP, "message": MARKUP}) + "\n"
    )
    page = Path(write_report(job.files.path)).read_text()
    assert not re.search(r"<script>alert", page)
    assert "&lt;script&gt;alert" in page


def test_data_tools_show_names_and_values_as_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A column of that name, values of that text, and a file that is called so."""
    folder = tmp_path / "data"
    folder.mkdir()
    values = pa.array([MARKUP] * 50)
    rows = {"label": pa.array([0, 1] * 25), MARKUP: values, "age": pa.array([float("nan")] * 50)}
    pq.write_table(pa.table(rows), folder / "a[red]\x1b[2J.parquet")
    config = {
        "name": "shown",
        "data": {"train": str(folder)},
        "schema": {
            "label": {"column": "label"},
            "dense": [{"name": "age"}],
            "sparse": [{"name": MARKUP, "mapping": {"kind": "hash"}}],
        },
        "tables": [{"name": "t", "rows": 16, "dim": 4, "features": [MARKUP]}],
        "model": {"name": "dlrm", "args": {"dense_arch": [4], "over_arch": [4, 1]}},
    }
    path = tmp_path / "train.yaml"
    path.write_text(yaml.safe_dump(config))
    assert run(["data", "check", str(path)]) == 1
    run(["data", "inspect", str(folder)])
    shown = "".join(capfd.readouterr())
    assert "\x1b[2J" not in shown, "a name or a value clears the screen"
    assert "<script>" in shown
