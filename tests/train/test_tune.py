"""A search: what is varied, what is refused, and a whole one on Ray that is killed and goes on."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from ray import tune as ray_tune
from rich.console import Console

from rayrec.storage.folder import open_folder
from rayrec.train import ConfigError, TrainError, parse_config
from rayrec.train.driver.console import Display
from rayrec.train.errors import RunInUseError
from rayrec.train.tune.search import (
    Search,
    Trial,
    _draws,
    _first_values,
    _trials,
    _when_free,
    _write,
    check_metric,
    folder_of,
    tune,
)
from rayrec.train.tune.shown import progress_of, trials_table
from rayrec.train.tune.space import check_space, space_of, with_values
from tests.s3 import s3_bucket
from tests.train import configs
from tests.train.small import raw_config

RAW = raw_config(Path("/nowhere"))


@pytest.mark.parametrize(
    ("param", "text"),
    [
        ("optimizers.sparse.lr", "write it as FIELD=SPACE"),
        ("optimizers.sparse.lr=0.1", "; expected "),
        ("optimizers.sparse.lr=[]", "; expected "),
        ("optimizers.sparse.lr=log(0,1)", "above 0"),
        ("optimizers.sparse.lr=uniform(2,1)", "low must be below high"),
        ("optimizers.sparse.lr=uniform(1)", "two numbers"),
        ("trainer.batch_size=int(1.5,2)", "two whole numbers"),
    ],
)
def test_a_space_that_cannot_be_drawn_from_is_refused(param: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        space_of([param])


def test_nothing_to_vary_and_a_field_twice_are_refused() -> None:
    with pytest.raises(ConfigError, match="nothing to search over"):
        space_of([])
    with pytest.raises(ConfigError, match="given twice"):
        space_of(["trainer.seed=[1]", "trainer.seed=[2]"])


@pytest.mark.parametrize(
    ("param", "text"),
    [
        ("optimizers.sparse.rate=[0.1]", "optimizers.sparse.rate"),
        ("optimizers.sparse.kind=[adam, best]", "'best'"),
        ("optimizers.sparse.lr=uniform(-1,1)", "with -1"),
        ("trainer.batch_size=int(0,64)", "with 0"),
    ],
)
def test_each_choice_and_both_ends_must_make_a_config(param: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        check_space(RAW, space_of([param]))


def test_draws_land_in_their_fields_and_bounds() -> None:
    space = space_of(
        ["optimizers.sparse.lr=log(0.001,0.1)", "trainer.seed=int(1,3)", "optimizers.sparse.kind=[adam, sgd]"]
    )
    check_space(RAW, space)
    drawn = [{field: domain.sample() for field, domain in space.items()} for _ in range(200)]
    assert {values["trainer.seed"] for values in drawn} == {1, 2, 3}
    assert all(0.001 <= values["optimizers.sparse.lr"] <= 0.1 for values in drawn)
    below = sum(values["optimizers.sparse.lr"] < 0.01 for values in drawn)
    assert 60 < below < 140, "half of the draws of a logarithmic range lie below its geometric middle"
    config = parse_config(with_values(RAW, drawn[0]))
    assert config.optimizers.sparse.kind == drawn[0]["optimizers.sparse.kind"]
    assert config.trainer.seed == drawn[0]["trainer.seed"]


def test_a_drawn_value_stays_what_it_is() -> None:
    (domain,) = (space := space_of(["optimizers.dense.max_gradient_norm=[null]"])).values()
    check_space(RAW, space)
    config = parse_config(with_values(RAW, {"optimizers.dense.max_gradient_norm": domain.sample()}))
    assert config.optimizers.dense.max_gradient_norm is None


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("optimizers.sparse.lr=log(0.001,1)", 0.1),
        ("optimizers.dense.weight_decay=uniform(0,1)", 0.0),
        ("optimizers.sparse.kind=[adam, rowwise_adagrad]", "rowwise_adagrad"),
        ("optimizers.dense.max_gradient_norm=[null, 1.0]", None),
        ("optimizers.tables.user.lr=log(0.001,1)", 0.1),
        ("tables.user.dim=[8, 16]", 8),
        ("model.args.over_arch=[[16, 1], [4, 1]]", [16, 1]),
        ("model.args.dropout=uniform(0,0.5)", 0.0),
        ("model.loss.label_smoothing=uniform(0,0.5)", 0.0),
        ("trainer.early_stopping.patience=int(1,3)", ...),
        ("optimizers.sparse.lr=[0.2, 0.3]", ...),
    ],
)
def test_the_first_trial_has_the_values_that_the_config_trains_with(param: str, value: Any) -> None:
    """Of a field that is not written, its default; other fields of the search do not change it."""
    field = param.partition("=")[0]
    outside = "trainer.batch_size=[3, 5]"
    space = space_of([param, outside])
    config = parse_config(RAW)
    expected = {} if value is ... else {field: value}
    assert _first_values(config, space, None) == expected
    draws = _draws(Search(params=[]), config, space)
    assert draws._points_to_evaluate == ([expected] if expected else [])


def test_the_first_trial_has_the_defaults_of_a_factory() -> None:
    def factory(*, tables: Any, num_dense: int, device: Any, layers: tuple[int, ...] = (8, 4), dropout: float = 0.1):
        raise AssertionError("only its signature is read")

    raw = {**RAW, "model": {"args": {"dropout": 0.2}}}
    space = space_of(["model.args.layers=[[8, 4], [16, 8]]", "model.args.dropout=uniform(0,0.5)"])
    assert _first_values(parse_config(raw), space, factory) == {"model.args.layers": [8, 4], "model.args.dropout": 0.2}


@pytest.mark.parametrize(("metric", "first", "best"), [("auc", 0.7, 0.8), ("ne", 0.6, 0.55)])
def test_the_best_value_in_the_progress_is_that_of_the_table(metric: str, first: float, best: float) -> None:
    """Both are the best of all evaluations of all trials: of failed ones, and of those that ended before a restart."""
    scores = {"a": [0.6, 0.7, 0.65], "b": [0.55, 0.8, 0.6], "c": [0.75, 0.58]}
    out = io.StringIO()
    mode = Search(params=[], metric=metric).mode
    trials = [ray_tune.experiment.Trial("x", stub=True, trial_id=name) for name in scores]
    for trial in trials:
        for count, score in enumerate(scores[trial.trial_id], 1):
            trial.update_last_result({metric: score, "evaluations": count, "training_iteration": count})
    progress = progress_of(metric, mode, 4, Display(Console(file=out, width=200)))
    first_trial, second, third = trials
    progress.on_trial_complete(0, [first_trial], first_trial)
    first_trial.set_status("TERMINATED")
    progress.on_trial_error(0, trials[:2], second)
    second.set_status("ERROR")
    progress.on_trial_complete(0, trials, third)
    lines = out.getvalue().splitlines()
    assert f"{metric} {first:.4f}, the best of 3 evaluations (1 of 4 trials, best {first:.4f})" in lines[0]
    assert f"failed (2 of 4 trials, best {best:.4f})" in lines[1]
    frames = {name: pd.DataFrame({metric: values}) for name, values in scores.items()}
    results = [
        ray_tune.Result(metrics={"config": {}}, checkpoint=None, error=None, path=name, metrics_dataframe=frame)
        for name, frame in frames.items()
    ]
    assert _trials(results, Search(params=[], metric=metric))[0].score == best
    assert f"(3 of 4 trials, best {best:.4f})" in lines[2]


def result(name: str, scores: list[float | None] | None, error: Exception | None = None) -> ray_tune.Result:
    """What Ray Tune gives of a trial; no frame where it reported nothing."""
    frame = None if scores is None else pd.DataFrame({"auc": scores, "logloss": scores, "config/x": name})
    config = {"optimizers.sparse.lr": 0.123456, "trainer.seed": 3}
    return ray_tune.Result(
        metrics={"config": config}, checkpoint=None, error=error, path=f"runs/{name}", metrics_dataframe=frame
    )


def test_the_best_trial_is_first_and_those_without_a_score_last() -> None:
    lost = RuntimeError("first line\nthe last line")
    results = [
        result("b", [0.5, 0.7, 0.6]),
        result("e", None, lost),
        result("a", [0.8, None]),
        result("d", [], RuntimeError()),
        result("c", [0.7]),
        result("f", [0.9, 0.65], RuntimeError("late")),
    ]
    most = _trials(results, Search(params=[], metric="auc"))
    assert [(trial.name, trial.score, trial.evaluations, trial.error) for trial in most] == [
        ("f", 0.9, 2, "late"), ("a", 0.8, 1, None), ("b", 0.7, 3, None), ("c", 0.7, 1, None),
        ("d", None, 0, "RuntimeError"), ("e", None, 0, "the last line"),
    ]  # fmt: skip
    assert most[0].values == {"optimizers.sparse.lr": 0.123456, "trainer.seed": 3}
    least = _trials(results, Search(params=[], metric="logloss"))
    assert [(trial.name, trial.score) for trial in least] == [
        ("b", 0.5), ("f", 0.65), ("c", 0.7), ("a", 0.8), ("d", None), ("e", None)
    ]  # fmt: skip
    assert [trial.score for trial in _trials(results, Search(params=[], metric="gauc"))] == [None] * 6
    around_0 = _trials([result("a", [0.0]), result("b", [-0.5]), result("c", [0.5])], Search(params=[]))
    assert [trial.name for trial in around_0] == ["c", "a", "b"]


def test_the_table_of_trials_is_what_it_was_drawn_from() -> None:
    out = io.StringIO()
    values = {"optimizers.sparse.lr": 0.123456, "trainer.seed": 3}
    trials = [
        Trial(name="trial-1", values=values, score=0.75, evaluations=2),
        Trial(name="trial-2", values=values, score=None, evaluations=0, error="out of [red]memory"),
    ]
    Console(file=out, width=150).print(trials_table(trials, "auc"))
    shown = [[cell.strip() for cell in re.split("[│┃]", line)[1:-1]] for line in out.getvalue().splitlines()]
    assert [row for row in shown if row] == [
        ["trial", "auc", "evaluations", "optimizers.sparse.lr", "trainer.seed"],
        ["trial-1", "0.7500", "2", "0.1235", "3"],
        ["trial-2", "failed: out of [red]memory", "0", "0.1235", "3"],
    ]
    Console(file=out, width=150).print(trials_table([], "auc"))


def test_the_best_values_are_written_as_a_config(tmp_path: Path) -> None:
    values = {"optimizers.sparse.lr": 0.2}
    best = Trial(name="a", values=values, score=0.7, evaluations=1)
    other = Trial(name="b", values={"optimizers.sparse.lr": 0.3}, score=0.6, evaluations=1)
    _write(tmp_path, RAW, search := Search(params=[], metric="auc"), [best, other])
    config = parse_config(yaml.safe_load((tmp_path / "best.yaml").read_text()))
    assert (config.name, config.optimizers.sparse.lr) == ("small", 0.2)
    told = json.loads((tmp_path / "trials.json").read_text())
    assert (told["metric"], told["mode"]) == ("auc", "max")
    assert told["trials"][0] == {
        "trial": "a", "name": "a", "values": values, "score": 0.7, "evaluations": 1, "error": None
    }  # fmt: skip
    (tmp_path / "best.yaml").unlink()
    for trials in ([], [Trial(name="a", values=values, score=None, evaluations=0, error="x")]):
        _write(tmp_path, RAW, search, trials)
        assert not (tmp_path / "best.yaml").exists()


def test_a_search_that_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    config = parse_config(raw_config(tmp_path))
    params = ["optimizers.sparse.lr=[0.1]"]
    wrong = parse_config({**raw_config(tmp_path), "data": {"train": "a"}})
    with pytest.raises(TrainError, match=r"data\.eval: a search compares evaluations"):
        tune(wrong, Search(params=params))
    for metric, text in (
        ("aux", r"metric=aux: not computed; did you mean 'auc'\? \(evaluations of this config have auc, ne, "),
        ("gauc", r"metric=gauc: needs schema\.group; did you mean 'auc'"),
        ("rmse", r"metric=rmse: not computed"),
    ):
        with pytest.raises(TrainError, match=text):
            tune(config, Search(params=params, metric=metric))
    raw = raw_config(tmp_path)
    raw["schema"]["group"] = {"column": "user"}
    check_metric("gauc", parse_config(raw))
    raw = raw_config(tmp_path)
    raw["schema"]["label"] = {"column": "age", "kind": "number"}
    check_metric("rmse", parse_config(raw))
    with pytest.raises(TrainError, match="metric=auc: not computed"):
        check_metric("auc", parse_config(raw))
    with pytest.raises(ConfigError, match="nothing to search over"):
        tune(config, Search(params=[]))
    with pytest.raises(TrainError, match="track='tracker' must be one of mlflow, wandb"):
        tune(config, Search(params=params, track="tracker"))


def test_a_trial_waits_for_what_is_left_of_a_killed_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its process may hold the run folder for some seconds."""
    monkeypatch.setattr("rayrec.train.tune.search.time.sleep", lambda _: None)
    tries: list[int] = []

    def fit() -> Any:
        tries.append(1)
        if len(tries) < 3:
            raise RunInUseError("in use")
        return "trained"

    assert _when_free(fit) == "trained" and len(tries) == 3
    monkeypatch.setattr("rayrec.train.tune.search.OUTLIVES_S", 0.0)
    tries.clear()
    with pytest.raises(RunInUseError):
        _when_free(fit)


def run(folder: Path, *more: str) -> subprocess.Popen[str]:
    words = ["tune", "config.yaml", "--param", "optimizers.sparse.lr=[0.0001,0.02,0.3]", "--trials", "4", *more]
    return subprocess.Popen(
        [sys.executable, "-m", "rayrec.cli", *words, "--concurrent", "1"],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_search_in_object_storage_that_is_killed_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3_bucket("tries") as options:
        path = f"s3://tries/runs{options}"
        own = {"name": "exact_auc", "factory": "torchmetrics.classification:BinaryAUROC"}
        raw = configs.of_init("shop", tmp_path)
        raw["trainer"] |= {"epochs": 3, "metrics": [own]}
        raw["storage"]["path"] = path
        (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw))
        there = open_folder(folder_of(parse_config(raw)))

        def ended() -> dict[str, bytes]:
            trials = [there.sub(name) for name in there.names() if name.startswith("trial-")]
            return {one.name: one.read("result.json") for one in trials if "result.json" in one.names()}

        words = ("--search", "optuna", "--metric", "exact_auc")
        first = run(tmp_path, *words)
        until = time.monotonic() + 400
        while not ended() and time.monotonic() < until and first.poll() is None:
            time.sleep(0.5)
        before = ended()
        os.killpg(first.pid, signal.SIGKILL)
        shown, _ = first.communicate()
        assert before, shown
        second = run(tmp_path, *words)
        shown, _ = second.communicate(timeout=400)
        assert second.returncode == 0, shown
        assert "resuming the interrupted search" in shown
        told = json.loads(there.read("trials.json"))
        assert len(told["trials"]) == 4 and not [trial for trial in told["trials"] if trial["error"]]
        scores = [trial["score"] for trial in told["trials"]]
        assert scores == sorted(scores, reverse=True)
        after = ended()
        assert {name: after[name] for name in before} == before, "what was finished was trained again"
        best = parse_config(yaml.safe_load(there.read("best.yaml")))
        assert best.optimizers.sparse.lr == told["trials"][0]["values"]["optimizers.sparse.lr"]


@pytest.mark.parametrize(
    ("space", "text"),
    [
        ("uniform(1,1)", "low must be below high"),
        ("log(-1,1)", "low must be below high, and above 0"),
        ("int(2,2)", "low must be below high"),
        ("uniform(0,true)", r"uniform\(…\) takes two numbers"),
        ("int(0,1,2)", r"int\(…\) takes two whole numbers"),
        ("3", "got '3'; expected"),
    ],
)
def test_bounds_that_hold_no_value_are_refused(space: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"--param trainer.seed={space[:3]}.*{text}"):
        space_of([f"trainer.seed={space}"])
    with pytest.raises(ConfigError, match="write it as FIELD=SPACE"):
        space_of(["=[1]"])


def test_bounds_are_drawn_too() -> None:
    space = space_of([" trainer.seed = int(0, 1)", "optimizers.dense.weight_decay=uniform(-0.5, 0)"])
    assert {space["trainer.seed"].sample() for _ in range(64)} == {0, 1}
    decay = space["optimizers.dense.weight_decay"]
    assert (decay.lower, decay.upper) == (-0.5, 0) and all(-0.5 <= decay.sample() <= 0 for _ in range(8))
