"""A search: what is varied, what is refused, and a whole one on Ray that is killed and goes on."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import cloudpickle
import pandas as pd
import pytest
import yaml
from ray import tune as ray_tune
from rich.console import Console

from rayrec.storage import open_folder
from rayrec.train import ConfigError, Display, ResourceError, TrainError, parse_config
from rayrec.train.tune.search import (
    NEVER,
    Search,
    Trial,
    _draws,
    _first_values,
    _Reports,
    _trials,
    _write,
    check_metric,
    folder_of,
    tune,
)
from rayrec.train.tune.shown import progress_of, trials_table
from rayrec.train.tune.space import check_space, space_of, with_values
from tests.s3 import s3_bucket
from tests.train import configs
from tests.train.pretended_ray import PretendedRay, pretended
from tests.train.small import raw_config, write_all

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


def run(folder: Path, *more: str) -> subprocess.Popen[str]:
    words = ["tune", "config.yaml", "--param", "optimizers.sparse.lr=[0.0001,0.02,0.3]", "--trials", "3", *more]
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
        assert len(told["trials"]) == 3 and not [trial for trial in told["trials"] if trial["error"]]
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


__all__ = ["pretended"]


RATES = [0.001, 0.3]


PARAM = f"optimizers.sparse.lr={RATES}"


class Tuner:
    """Trains with each rate, and keeps what it was told."""

    made: ClassVar[list[Tuner]] = []
    rates: ClassVar[list[float]] = RATES
    name = ""
    reports: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, trainable: Callable[[Any], None], **given: Any) -> None:
        self.trainable, self.given, self.restored = trainable, given, ""
        Tuner.made.append(self)

    @staticmethod
    def can_restore(path: str, **_: Any) -> bool:
        return Path(path).exists()

    @classmethod
    def restore(cls, path: str, trainable: Callable[[Any], None], **given: Any) -> Tuner:
        tuner = cls(trainable, **given)
        tuner.restored = path
        return tuner

    def fit(self) -> list[Any]:
        if "run_config" in self.given:
            Path(self.given["run_config"].storage_path).mkdir(parents=True, exist_ok=True)
        return [self.trial(number, rate) for number, rate in enumerate(Tuner.rates)]

    def trial(self, number: int, rate: float) -> Any:
        values = {"optimizers.sparse.lr": rate}
        Tuner.name, Tuner.reports = f"trial-{number}", []
        self.trainable(values)
        frame = pd.DataFrame(Tuner.reports) if Tuner.reports else None
        return ray_tune.Result(
            metrics={"config": values}, checkpoint=None, error=None, path=f"x/{Tuner.name}", metrics_dataframe=frame
        )


@pytest.fixture(autouse=True)
def _tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    Tuner.made, Tuner.rates = [], RATES
    for name, pretends in (
        ("Tuner", Tuner),
        ("report", lambda figures: Tuner.reports.append(figures)),
        ("get_context", lambda: SimpleNamespace(get_trial_name=lambda: Tuner.name)),
    ):
        monkeypatch.setattr(ray_tune, name, pretends)


def searched(folder: Path, search: Search, **trainer: Any) -> tuple[list[Any], list[str]]:
    """The trials, and what was shown."""
    raw = raw_config(folder)
    raw["trainer"] |= {"epochs": 2, **trainer}
    out = io.StringIO()
    trials = tune(parse_config(raw), search, display=Display(Console(file=out, width=300)))
    return trials, out.getvalue().splitlines()


def test_a_search_tries_its_values_and_goes_on_where_it_was(pretended: PretendedRay, tmp_path: Path) -> None:
    write_all(tmp_path, rows=128)
    folder = tmp_path / "runs" / "small-tune"
    trials, lines = searched(tmp_path, Search(params=[PARAM], trials=2, metric="ne", grace=3))
    assert lines == [f"2 trials, 4 at a time, in {folder}"]
    by_name = {trial.name: trial for trial in trials}
    assert {name: trial.values for name, trial in by_name.items()} == {
        f"trial-{n}": {"optimizers.sparse.lr": rate} for n, rate in enumerate(RATES)
    }
    assert [trial.score for trial in trials] == sorted(trial.score for trial in trials)
    assert {trial.evaluations for trial in trials} == {2}
    for name, trial in by_name.items():
        own = yaml.safe_load((folder / name / "config.yaml").read_text())
        assert (own["name"], own["optimizers"]["sparse"]["lr"]) == (name, trial.values["optimizers.sparse.lr"])
        figures = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
        assert trial.score == min(line["ne"] for line in figures if line["kind"] == "eval")
    best = yaml.safe_load((folder / "best.yaml").read_text())
    assert (best["name"], best["optimizers"]["sparse"]["lr"]) == ("small", trials[0].values["optimizers.sparse.lr"])
    assert [(line["evaluations"], line["step"]) for line in Tuner.reports] == [(1, 2), (2, 4)]

    (tuner,) = Tuner.made
    how, where = tuner.given["tune_config"], tuner.given["run_config"]
    assert (how.metric, how.mode, how.num_samples, how.max_concurrent_trials) == ("ne", "min", 2, 4)
    assert (
        how.trial_name_creator(SimpleNamespace(trial_id="7"))
        == "trial-7"
        == how.trial_dirname_creator(SimpleNamespace(trial_id="7"))
    )
    assert (where.name, where.storage_path, len(where.callbacks), where.verbose) == (".tune", str(folder), 1, 0)
    scheduler = vars(how.scheduler)
    assert (scheduler["_time_attr"], scheduler["_max_t"], scheduler["_reduction_factor"]) == ("evaluations", NEVER, 2)
    assert tuner.trainable._resources.required_resources == {"CPU": 1}

    (folder / ".tune").touch()
    again, lines = searched(tmp_path, Search(params=[PARAM], trials=2, metric="ne"))
    assert lines[1] == "resuming the interrupted search"
    tuner = Tuner.made[-1]
    assert tuner.restored == str(folder / ".tune") and tuner.given["resume_errored"] is True
    assert tuner.given["param_space"].keys() == {"optimizers.sparse.lr"}
    assert [(trial.name, trial.evaluations) for trial in again] == [(trial.name, 1) for trial in again]
    assert {trial.name for trial in again} == by_name.keys(), "those that had ended are told once more"


def test_a_search_by_a_metric_of_ones_own_has_its_direction(pretended: PretendedRay, tmp_path: Path) -> None:
    write_all(tmp_path, rows=128)
    brier = {"name": "brier", "factory": "torchmetrics:MeanSquaredError", "lower_is_better": True}
    exact = {"name": "exact_auc", "factory": "torchmetrics.classification:BinaryAUROC"}
    for metric, mode, best in (("brier", "min", min), ("exact_auc", "max", max)):
        search = Search(params=[PARAM], trials=2, metric=metric)
        trials, _ = searched(tmp_path, search, metrics=[brier, exact], log_every=4)
        (how,) = [tuner.given["tune_config"] for tuner in Tuner.made[-1:]]
        assert (how.metric, how.mode) == (metric, mode)
        assert [trial.score for trial in trials] == sorted((t.score for t in trials), reverse=mode == "max")
        for trial in trials:
            lines = (tmp_path / "runs/small-tune" / trial.name / "metrics.jsonl").read_text().splitlines()
            evals = [line for line in map(json.loads, lines) if line["kind"] == "eval"]
            assert trial.score == best(line[metric] for line in evals)
        shutil.rmtree(tmp_path / "runs")


def test_workers_of_a_trial_are_counted_and_must_fit(pretended: PretendedRay, tmp_path: Path) -> None:
    Tuner.rates = []
    search = Search(params=[PARAM], trials=3)
    for cpus, at_a_time in [(4.0, 2), (5.0, 2), (2.0, 1)]:
        pretended.resources = {"CPU": cpus}
        with pytest.raises(TrainError, match="no trial reached an evaluation: all stopped"):
            searched(tmp_path, search, num_workers=2, cpus_per_worker=1.0)
        tuner = Tuner.made[-1]
        assert tuner.given["tune_config"].max_concurrent_trials == at_a_time
        assert tuner.trainable._resources.required_resources == {"CPU": 0.001}
    with pytest.raises(ResourceError, match="but the Ray cluster has 2;"):
        searched(tmp_path, search, num_workers=2, cpus_per_worker=1.5)
    with pytest.raises(TrainError, match="no trial"):
        searched(tmp_path, Search(params=[PARAM], concurrent=3), use_gpu=False)
    assert Tuner.made[-1].given["tune_config"].max_concurrent_trials == 3
    pretended.resources = {"CPU": 0.5}
    with pytest.raises(TrainError, match="no trial"):
        searched(tmp_path, search)
    assert Tuner.made[-1].given["tune_config"].max_concurrent_trials == 1, "one at least, whatever Ray counts"


def test_draws_are_those_of_their_seed(pretended: PretendedRay, tmp_path: Path) -> None:
    Tuner.rates = []

    def drawn(seed: int) -> float:
        with pytest.raises(TrainError, match="no trial"):
            searched(tmp_path, Search(params=["optimizers.sparse.lr=uniform(0.1, 0.9)"], seed=seed))
        given = Tuner.made[-1].given
        state = given["tune_config"].search_alg._random_state
        return float(given["param_space"]["optimizers.sparse.lr"].sample(random_state=state))

    assert drawn(5) == drawn(5) != drawn(6)


def test_evaluations_are_counted_as_they_are_told() -> None:
    reports = _Reports("auc")
    for number in (1, 2):
        reports.evaluation({"auc": 0.5, "start": "x", "by_time": [], "step": 3})
        assert Tuner.reports[-1] == {"auc": 0.5, "step": 3, "evaluations": number}
    reports.evaluation({"auc": None, "ne": 1.0, "step": 4})
    assert (reports.count, str(reports.problem)) == (2, "evaluations have no metric 'auc'; available: ne, step")


def test_optuna_begins_with_the_values_of_the_config_and_draws_by_its_seed(
    pretended: PretendedRay, tmp_path: Path
) -> None:
    write_all(tmp_path, rows=128)
    params = ["optimizers.sparse.lr=log(0.01,1)", "optimizers.dense.kind=[adam, sgd]"]

    def drawn(seed: int, **search: Any) -> list[Any]:
        config = parse_config(raw_config(tmp_path))
        draws = _draws(Search(params=params, seed=seed, **search), config, space := space_of(params))
        draws.set_search_properties("auc", "max", space)
        return [draws.suggest(str(number)) for number in range(4)]

    first, *others = drawn(1, algorithm="optuna")
    assert first == {"optimizers.sparse.lr": 0.1, "optimizers.dense.kind": "adam"}
    assert [first, *others] == drawn(1, algorithm="optuna") != drawn(2, algorithm="optuna")
    for values in others:
        check_space(raw_config(tmp_path), {name: ray_tune.choice([value]) for name, value in values.items()})
    with pytest.raises(TrainError, match="search='tpe': allowed: random, optuna"):
        drawn(1, algorithm="tpe")
    outside = _draws(Search(params=[PARAM]), parse_config(raw_config(tmp_path)), space_of([PARAM]))
    assert outside._points_to_evaluate == [], "0.1 is not among the choices"


def test_a_search_is_kept_in_remote_storage_and_says_how_it_goes(pretended: PretendedRay, tmp_path: Path) -> None:
    write_all(tmp_path, rows=128)
    raw = raw_config(tmp_path)
    raw["storage"]["path"] = f"file://{tmp_path}/remote"
    out = io.StringIO()
    display = Display(Console(file=out, width=300))
    trials = tune(parse_config(raw), Search(params=[PARAM], trials=2), display=display)
    there = tmp_path / "remote" / "small-tune"
    assert {path.name for path in there.iterdir()} >= {"trial-0", "trial-1", "trials.json", "best.yaml"}
    assert json.loads((there / "trials.json").read_text())["trials"][0]["trial"] == trials[0].name
    where = Tuner.made[-1].given["run_config"]
    assert (where.storage_path, where.storage_filesystem.type_name) == (str(there), "local")
    (progress,) = where.callbacks
    assert type(cloudpickle.loads(cloudpickle.dumps(progress))).__name__ == "Progress"
    ended = ray_tune.experiment.Trial("x", stub=True, trial_id="0", trial_name_creator=lambda _: "trial-0")
    ended.update_last_result({"auc": 0.7, "evaluations": 1, "training_iteration": 1})
    progress.on_trial_complete(0, [ended], ended)
    assert out.getvalue().splitlines()[-1] == (
        "trial-0: auc 0.7000, the best of 1 evaluation (1 of 2 trials, best 0.7000)"
    )


def test_a_search_needs_its_figure_in_the_evaluations() -> None:
    reports = _Reports("gauc")
    reports.evaluation({"auc": 0.5, "step": 3, "start": "2026", "gauc": None})
    assert str(reports.problem) == "evaluations have no metric 'gauc'; available: auc, step" and reports.count == 0
    modes = {metric: Search(params=[], metric=metric).mode for metric in ("auc", "ne", "logloss", "rmse", "r2", "mae")}
    assert [metric for metric, mode in modes.items() if mode == "min"] == ["ne", "logloss", "rmse", "mae"]
