"""A whole search in this process: Ray runs nothing (`pretended_ray.py`), and the tuner makes its trials one by one."""

from __future__ import annotations

import io
import json
import shutil
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

from rayrec.train import Display, ResourceError, TrainError, parse_config
from rayrec.train.driver.trackers import tracker
from rayrec.train.tune.search import NEVER, Search, _draws, _Reports, tune
from rayrec.train.tune.space import check_space, space_of
from tests.train.pretended_ray import PretendedRay, pretended
from tests.train.small import raw_config, write_all

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
    monkeypatch.setattr(Tuner, "made", [])
    monkeypatch.setattr(Tuner, "rates", RATES)
    monkeypatch.setattr(ray_tune, "Tuner", Tuner)
    monkeypatch.setattr(ray_tune, "report", lambda figures: Tuner.reports.append(figures))
    monkeypatch.setattr(ray_tune, "get_context", lambda: SimpleNamespace(get_trial_name=lambda: Tuner.name))


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
    with pytest.raises(TrainError, match="track='MLflow' must be one of mlflow, wandb"):
        tracker("MLflow", "x")
