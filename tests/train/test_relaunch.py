"""A run goes on, whatever its config: stopped by a signal and launched again, it ends as if it had not been stopped."""

from __future__ import annotations

import copy
import gzip
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from itertools import count, islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import nn

from rayrec.checkpoint import CheckpointStore
from rayrec.cli import run
from rayrec.data import DataSet
from rayrec.models import BUILT_IN, RETRIEVERS
from rayrec.train import (
    ConfigError,
    Interrupted,
    Result,
    TrainConfig,
    Trainer,
    evaluate_run,
    export_run,
    index_run,
    load_config,
    parse_config,
)
from rayrec.train.config.difference import differing
from rayrec.train.run.resolved import ResolvedValues
from tests.cli.test_init import FILES, REAL
from tests.s3 import s3_bucket
from tests.train import configs
from tests.train.chaos import MARK, marked
from tests.train.small import config_of, run_folder

STOP_AT = 2  # steps


def stopping(factory: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """A factory whose model sends this process Ctrl-C in a step of its training."""

    def make(**arguments: Any) -> nn.Module:
        model, steps = factory(**arguments), count(1)

        def interrupt(module: nn.Module, _: Any) -> None:
            if module.training and next(steps) == STOP_AT:
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)  # the few steps that are left must not end before the signal is heard

        model.register_forward_pre_hook(interrupt)
        return model

    return make


def tensors(folder: Any) -> dict[str, torch.Tensor]:
    """All of the newest checkpoint."""
    store = CheckpointStore(folder.checkpoints)
    latest = store.latest()
    assert latest is not None
    with store.reader(latest) as reader:
        return {key: reader.tensor(key) for key in reader.index.tensors}


def check_resolved(folder: Any) -> None:
    """Only `ResolvedValues` sets the stored config apart from the given one, so a relaunch takes all of it over."""
    given, resolved = folder.read_given(), folder.read_config()
    assert given is not None and resolved is not None
    filled = ResolvedValues.of(resolved).fill(parse_config(given)).to_dict()
    counted = {"trainer.epochs"} if given["data"]["progressive"] else set()  # counted anew by each launch
    assert set(differing([filled, resolved])) <= counted, "what a run resolves gets a line in resolved.py"


def check_relaunch(
    raw: dict[str, Any], folder: Path, factory: Callable[..., nn.Module] | None = None, exports: bool = True
) -> Result:
    """Trains without a stop and with one, then uses the run that was stopped.

    Args:
        exports: Also export it, or its index, and predict by the export.
    """
    runs = {name: copy.deepcopy(raw) for name in ("whole", "stopped")}
    for name, own in runs.items():
        own["storage"] |= {"path": str(folder / name)}
    whole = Trainer(parse_config(runs["whole"]), factory=factory).fit()
    with pytest.raises(Interrupted):
        Trainer(parse_config(runs["stopped"]), factory=stopping(factory or BUILT_IN[raw["model"]["name"]])).fit()
    resumed = Trainer(parse_config(runs["stopped"]), factory=factory).fit()
    stopped = run_folder(resumed.folder)
    check_resolved(stopped)
    assert (resumed.steps, resumed.eval) == (whole.steps, whole.eval)
    configs_of_runs = [run_folder(result.folder).read_config() for result in (whole, resumed)]
    assert set(differing(configs_of_runs)) == {"storage.path"}, "what `runs compare` tells"
    states = tensors(run_folder(whole.folder)), tensors(stopped)
    assert states[0].keys() == states[1].keys()
    for key, tensor in states[0].items():
        assert torch.equal(tensor, states[1][key]), key
    rows = raw["data"].get("eval") or f"{raw['data']['train']}/{raw['data']['progressive']}=2"
    rows = rows["path"] if isinstance(rows, dict) else rows
    assert evaluate_run(stopped.path, rows, factory=factory)["step"] == whole.steps
    if not exports:
        return resumed
    if raw["model"].get("name") in RETRIEVERS:
        index_run(stopped.path, folder / "index", data=rows)
        return resumed
    exported = export_run(stopped.path, folder / "export", data=rows, factory=factory)
    assert run(["predict", str(exported.folder), rows, str(folder / "scores")]) == 0
    assert sum(pq.read_metadata(file).num_rows for file in (folder / "scores").glob("*.parquet")) > 0
    return resumed


@pytest.mark.parametrize("name", configs.CONFIGS)
def test_a_config_of_the_repository(name: str, tmp_path: Path) -> None:
    raw = configs.with_data(configs.of_repository(name), tmp_path / "data")
    check_relaunch(raw, tmp_path, exports=name == configs.CONFIGS[0])


@pytest.mark.parametrize("name", configs.GUIDES)
def test_a_config_of_a_guide(name: str, tmp_path: Path) -> None:
    check_relaunch(configs.with_data(configs.of_guide(name), tmp_path / "data"), tmp_path)


@pytest.mark.parametrize("name", configs.NOTEBOOKS)
def test_a_config_of_a_notebook(name: str, tmp_path: Path) -> None:
    raw, factory = configs.of_notebook(name, tmp_path)
    check_relaunch(configs.with_data(raw, tmp_path / "data"), tmp_path, factory)


@pytest.mark.parametrize("kind", configs.INIT)
def test_a_config_of_init(kind: str, tmp_path: Path) -> None:
    check_relaunch(configs.of_init(kind, tmp_path), tmp_path, exports=kind == "census")


@pytest.mark.parametrize(("name", "label"), REAL.items())
def test_a_config_of_init_for_a_public_file(name: str, label: str, tmp_path: Path) -> None:
    """Its first rows."""
    if not (FILES / name).exists():
        pytest.skip(f"needs {name} in {FILES} (RAYREC_SHARED_DATA)")
    file = tmp_path / name.removesuffix(".gz")
    with gzip.open(FILES / name, "rt", encoding="utf-8") as lines:
        file.write_text("".join(islice(lines, 2000)), encoding="utf-8")
    check_relaunch(configs.init(file, label), tmp_path)


def test_a_config_of_init_for_histories(tmp_path: Path) -> None:
    """Rows that `rayrec data sequence` made of a log."""
    log = pa.Table.from_pylist(
        [{"user": i % 50, "item": f"item {i * i % 23}", "at": 1_700_000_000 + 60 * i, "liked": int(i % 3 == 0)}
         for i in range(600)]
    )  # fmt: skip
    pq.write_table(log, tmp_path / "log.parquet")
    words = ["data", "sequence", str(tmp_path / "log.parquet"), "--out", str(tmp_path / "histories")]
    assert run([*words, "--user", "user", "--time", "at", "--column", "item"]) == 0
    check_relaunch(configs.init(tmp_path / "histories", "liked"), tmp_path)


def test_a_run_that_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    raw = configs.of_init("shop", tmp_path)
    other = Trainer(parse_config({**raw, "name": "other", "storage": {"path": str(tmp_path / "other")}})).fit()
    check_relaunch({**raw, "init_from": str(other.folder)}, tmp_path, exports=False)


def test_a_run_whose_table_begins_with_vectors(tmp_path: Path) -> None:
    """Its export and its predictions do not need the file either."""
    raw = configs.of_init("shop", tmp_path)
    table = raw["tables"][0]
    (feature,) = (feature for feature in raw["schema"]["sparse"] if feature["name"] == table["features"][0])
    ids = pacsv.read_csv(tmp_path / "shop.csv")[feature.get("column", feature["name"])].unique()
    vectors = [[0.1 * row + column for column in range(table["dim"])] for row in range(len(ids))]
    pq.write_table(pa.table({"id": ids, "vector": vectors}), tmp_path / "vectors.parquet")
    table["init"] = {"path": str(tmp_path / "vectors.parquet"), "id": "id", "vector": "vector"}
    check_relaunch(raw, tmp_path)


def test_days_of_data_that_init_described(tmp_path: Path) -> None:
    raw = configs.of_init("shop", tmp_path)
    rows = pacsv.read_csv(tmp_path / "shop.csv")

    def write_day(day: int) -> None:
        (tmp_path / "days" / f"day={day}").mkdir(parents=True)
        pq.write_table(rows.slice(day * 150, 150), tmp_path / "days" / f"day={day}" / "part-0.parquet")

    for day in range(3):
        write_day(day)
    raw["data"] = {"train": str(tmp_path / "days"), "progressive": "day", "read": {"reader": "local"}}
    resumed = check_relaunch(raw, tmp_path, exports=False)
    write_day(3)
    assert (resumed.epochs, Trainer(load_config(resumed.folder / "given.yaml")).fit().epochs) == (2, 3)


def test_a_run_in_object_storage_goes_on_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    raw = configs.of_init("shop", tmp_path)
    whole = Trainer(parse_config(copy.deepcopy(raw))).fit()
    with s3_bucket("runs") as options:
        config = parse_config({**raw, "storage": {"path": f"s3://runs/all{options}"}})
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
        with pytest.raises(Interrupted):
            Trainer(config, factory=stopping(BUILT_IN[raw["model"]["name"]])).fit()
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
        resumed = Trainer(config).fit()
        assert (resumed.steps, resumed.eval) == (whole.steps, whole.eval)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
        place = f"s3://runs/all/{raw['name']}{options}"
        assert run(["evaluate", place]) == 0
        page = tmp_path / "page.html"
        assert run(["runs", "compare", place, str(whole.folder), "--html", str(page)]) == 0
        assert "schema." not in page.read_text(encoding="utf-8"), "they differ in nothing that was found in the data"


def drawn_config(data: st.DataObject, exports: bool) -> None:
    with tempfile.TemporaryDirectory() as place:
        raw = data.draw(configs.drawn(configs.vocabulary(Path(place))))
        check_relaunch(configs.with_data(raw, Path(place) / "data"), Path(place), exports=exports)


QUICK = settings(max_examples=3, database=None, derandomize=True, phases=[Phase.generate],
                 suppress_health_check=list(HealthCheck))  # fmt: skip


@QUICK
@given(data=st.data())
def test_a_drawn_config(data: st.DataObject) -> None:
    drawn_config(data, exports=False)


@pytest.mark.long
@settings(QUICK, max_examples=5, derandomize=False)
@given(data=st.data())
def test_many_drawn_configs(data: st.DataObject) -> None:
    drawn_config(data, exports=True)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_config_of_init_goes_on_after_sigkill_with_two_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["init", configs.INIT["census"][0](tmp_path).name, "--label", "c6=50000+.", "--name", "census"]) == 0
    results = {}
    for name, kills in (("whole", False), ("killed", True)):
        mark = secrets.token_hex(8)
        words = [sys.executable, "-m", "rayrec.cli", "train", "census.yaml", "--name", name]
        fields = ("trainer.num_workers=2", "trainer.checkpoint_every=20", "trainer.epochs=2")
        words += [f"--set={field}" for field in fields]
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"PYTHONPATH": str(configs.ROOT), MARK: mark}
        if kills:
            folder = run_folder(tmp_path / "runs" / name)
            with open(tmp_path / "log", "w", encoding="utf-8") as log:
                process = subprocess.Popen(words, env=env, stdout=log, stderr=log, start_new_session=True)
                while not any(record.get("event") == "checkpoint" for record in folder.read_metrics()):
                    assert process.poll() is None, (tmp_path / "log").read_text()
                    time.sleep(0.01)
                for number in marked(mark):  # the command, its Ray and its workers
                    with suppress(ProcessLookupError):
                        os.kill(number, signal.SIGKILL)
                process.wait(60)
            assert not folder.result.exists()
        subprocess.run(words, env=env, check=True, timeout=300)
        results[name] = json.loads((tmp_path / "runs" / name / "result.json").read_text())
    whole, killed = results["whole"], results["killed"]
    assert killed["steps"] == whole["steps"] and killed["eval"]["samples"] == whole["eval"]["samples"]
    assert killed["eval"]["auc"] == pytest.approx(whole["eval"]["auc"], abs=1e-6)
    evaluate_run(tmp_path / "runs" / "killed")
    exported = export_run(tmp_path / "runs" / "killed", tmp_path / "export")
    assert run(["predict", str(exported.folder), str(tmp_path / "census-data" / "eval"), str(tmp_path / "scores")]) == 0


def test_a_run_keeps_to_the_table_version_that_it_began_with() -> None:
    def table(path: str, version: int | None = None) -> dict[str, Any]:
        return {"path": path, "table": "delta", "version": version}

    def versions(config: TrainConfig) -> Any:
        train = config.data.train
        of_train = train.version if isinstance(train, DataSet) else [one.version for one in train]
        return of_train, None if config.data.eval is None else config.data.eval.version

    def filled(config: TrainConfig, earlier: dict[str, Any] | None) -> Any:
        return versions(ResolvedValues.of(earlier).fill(config))

    config = config_of("data={train: {path: a, table: delta}, eval: {path: b, table: delta, version: 7}}")
    earlier = {"data": {"train": table("a", 3), "eval": table("b", 5)}}
    assert filled(config, earlier) == (3, 7), "what the config names counts"
    assert filled(config, {"data": {"train": table("a", 0)}}) == (0, 7)
    assert filled(config, {"data": {"train": table("c", 3)}}) == (None, 7), "another table"
    mixed = config_of("data={train: [{path: a, table: delta}, {path: c}, {path: d, table: delta}], eval: null}")
    before = {"data": {"train": [table("d", 4), {"path": "c"}, table("a", 2), table("a", 5)], "eval": None}}
    assert filled(mixed, before) == ([2, None, 4], None)
    assert filled(config_of(), None) == (None, None)


def test_open_options_of_dynamic_ids_are_those_of_features_with_the_same_rows() -> None:
    def rules(user: dict[str, Any], item: dict[str, Any], earlier: dict[str, Any] | None = None) -> list[Any]:
        sparse = [{"name": name, "mapping": {"kind": "dynamic", **own}} for name, own in (("a", user), ("b", item))]
        tables = [{"name": "both", "rows": 64, "dim": 8, "features": ["a", "b"]}]
        config = ResolvedValues.of(earlier).fill(config_of(schema__sparse=sparse, tables=tables))
        found = [feature["mapping"] for feature in config.to_dict()["schema"]["sparse"]]
        return [(each["evict"], each["half_life"], each["admit"] and each["admit"]["min_count"]) for each in found]

    one, lfu = {"admit": {"min_count": 1}}, {"evict": "lfu"}
    assert rules(lfu, one) == rules(one, lfu) == [("lfu", None, 1)] * 2
    assert rules({}, {"evict": "lfu_decay", "half_life": 9}) == [("lfu_decay", 9, None)] * 2
    assert rules({}, {}) == [(None, None, None)] * 2
    whole = {"kind": "dynamic", "evict": "lfu", "admit": {"min_count": 1, "probability": 1.0}}
    before = {"schema": {"sparse": [{"name": name, "mapping": whole} for name in ("a", "b")]}}
    assert rules(lfu, {}, before) == rules({}, one, before) == [("lfu", None, 1)] * 2
    assert rules({}, {"evict": "lru"}, before) == [("lru", None, 1)] * 2, "what the config names counts"
    for user, item in ((lfu, {"evict": "lru"}), (one, {"admit": {"min_count": 3}}), ({}, {"rows": 64})):
        with pytest.raises(ConfigError, match=r"'a' and 'b' share the rows of table 'both': .* with equal options"):
            rules(user, item)
