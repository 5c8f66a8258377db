"""Runs a search: every trial is a run with sampled values, stopped early by ASHA if other trials are better.

A trial's run folder is named after the trial, so an interrupted search can resume: Ray Tune restarts the unfinished
trials, and each resumes from its last checkpoint.
"""

from __future__ import annotations

import importlib.util
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console

from rayrec.models import RETRIEVERS
from rayrec.storage.errors import suggestion
from rayrec.storage.folder import open_folder
from rayrec.storage.locations import open_filesystem
from rayrec.train.config.checks import metric_names
from rayrec.train.config.difference import value_at
from rayrec.train.config.file import parse_config
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.config.trainer import LOWER_IS_BETTER, OF_GROUPS, lower_is_better
from rayrec.train.driver.callbacks import Callback
from rayrec.train.driver.cluster import Cluster, connected
from rayrec.train.driver.console import Display
from rayrec.train.driver.early_ray import default_env
from rayrec.train.driver.resources import demand_of, refuse_if_short
from rayrec.train.driver.trackers import tracker, trackers_of
from rayrec.train.errors import RunInUseError, TrainError
from rayrec.train.run.paths import resolved
from rayrec.train.run.result import Result
from rayrec.train.setup import build
from rayrec.train.setup.build import Factory
from rayrec.train.tune.shown import Trial, progress_of
from rayrec.train.tune.space import check_space, holds, space_of, with_values

NEARLY_NONE = 0.001  # CPUs; Ray Tune does not accept 0
STATE = ".tune"  # state folder of Ray Tune, in the folder of the search
OUTLIVES_S = 120.0
NEVER = 10**9  # maximum evaluations per trial: the config ends a trial


@dataclass(frozen=True, kw_only=True)
class Search:
    """Settings of a search.

    Args:
        params: `FIELD=SPACE` strings, see `space_of`.
        trials: number of trials.
        metric: evaluation metric to optimize; may be one of `trainer.metrics`.
        lower: whether a lower value is better; set by `tune`.
        concurrent: number of concurrent trials; None: as many as fit on the cluster's CPUs and GPUs.
        grace: evaluations before a trial may be stopped early; None: a third of the epochs, at least 2.
        algorithm: "random", or "optuna" (TPE), which requires that package.
        seed: seed of the sampling.
        track: "mlflow", "wandb" or "comet": also log each trial there; requires that package.
    """

    params: Sequence[str]
    trials: int = 10
    metric: str = "auc"
    lower: bool = False
    concurrent: int | None = None
    grace: int | None = None
    algorithm: str = "random"
    seed: int = 0
    track: str | None = None

    @property
    def mode(self) -> str:
        return "min" if self.lower or self.metric in LOWER_IS_BETTER else "max"


class _Reports(Display):
    """Reports evaluations to Ray Tune, and displays nothing.

    Args:
        problem: the error of an evaluation that could not be reported; the trial raises it after training.
    """

    def __init__(self, metric: str) -> None:
        super().__init__(Console(quiet=True, force_terminal=False))
        self._metric, self.count = metric, 0
        self.problem: TrainError | None = None

    def evaluation(self, record: Mapping[str, Any]) -> None:
        from ray import tune

        figures = {name: value for name, value in record.items() if isinstance(value, (int, float))}
        if self._metric not in figures:
            available = ", ".join(sorted(figures))
            self.problem = TrainError(f"evaluations have no metric {self._metric!r}; available: {available}")
            return
        self.count += 1
        tune.report({**figures, "evaluations": self.count})


def tune(
    config: TrainConfig, search: Search, *, factory: Factory | None = None, display: Display | None = None
) -> list[Trial]:
    """Run a search, or resume the search of this name, and return all trials, best first.

    Writes `<storage.path>/<name>-tune/`: a run folder per trial, `trials.json`, and `best.yaml`, the config with the
    values of the best trial.

    Raises:
        ValueError: an invalid search space or metric, no evaluation data, too few CPUs or GPUs, or all trials failed.
    """
    display = display or Display()
    config = resolved(config)
    if config.data.eval is None:
        raise TrainError("data.eval: a search compares evaluations; name rows to evaluate on")
    check_metric(search.metric, config)
    search = replace(search, lower=lower_is_better(search.metric, config.trainer.own_metrics))
    space = space_of(search.params)
    check_space(config.to_dict(), space)
    draws = _draws(search, config, space, factory)
    # Made here, as a trial has another working directory.
    callbacks = [*trackers_of(config), *([] if search.track is None else [tracker(search.track, config.name)])]
    with connected() as cluster:
        results = _run(config, search, space, draws, factory, callbacks, cluster, display)
        trials = _trials(results, search)
    _write(folder_of(config), config.to_dict(), search, trials)
    if all(trial.score is None for trial in trials):
        raise TrainError(f"no trial reached an evaluation: {next((t.error for t in trials if t.error), 'all stopped')}")
    return trials


def check_metric(metric: str, config: TrainConfig) -> None:
    """Check that evaluations of this config compute a metric.

    Raises:
        TrainError: they do not; lists the available metrics.
    """
    lacking = OF_GROUPS if config.data_schema.group is None and config.model.name not in RETRIEVERS else frozenset()
    names = metric_names(config.model, config.data_schema, config.trainer)
    available = [name for name in names if name not in lacking]
    if metric not in available:
        reason = "needs schema.group" if metric in lacking else "not computed"
        hint = f"{suggestion(metric, available)} (evaluations of this config have {', '.join(available)})"
        raise TrainError(f"metric={metric}: {reason}{hint}")


def _run(
    config: TrainConfig,
    search: Search,
    space: dict[str, Any],
    draws: Any,
    factory: Factory | None,
    callbacks: Sequence[Callback],
    cluster: Cluster,
    display: Display,
) -> Any:
    from ray import tune as ray_tune
    from ray.tune.schedulers import ASHAScheduler

    need, folder = demand_of(config, cluster.total()), folder_of(config)
    alone = config.trainer.most_workers == 0
    if alone:  # a trial trains in its own process
        need = replace(need, num_workers=1, cpus_per_worker=1.0, use_gpu=False, reader_cpus=0.0)
    else:
        refuse_if_short(need, cluster.total(), cluster.subject)
    concurrent = search.concurrent or need.times_in(cluster.total())
    display.say(f"{search.trials} trials, {concurrent} at a time, in {folder}")

    def run_trial(values: dict[str, Any]) -> None:
        _train_one(config, values, search.metric, factory, callbacks)

    # The process of a trial only waits for its workers, unless the trial has none and trains in it.
    trainable = ray_tune.with_resources(run_trial, {"CPU": 1 if alone else NEARLY_NONE})
    state, files = _state_of(folder)
    if ray_tune.Tuner.can_restore(f"{state}/{STATE}", **files):
        display.say("resuming the interrupted search", style="yellow")
        tuner = ray_tune.Tuner.restore(f"{state}/{STATE}", trainable, resume_errored=True, param_space=space, **files)
    else:
        grace = search.grace or max(2, config.trainer.epochs // 3)
        scheduler = ASHAScheduler(time_attr="evaluations", max_t=NEVER, grace_period=grace, reduction_factor=2)
        tuner = ray_tune.Tuner(
            trainable,
            param_space=space,
            tune_config=ray_tune.TuneConfig(
                metric=search.metric,
                mode=search.mode,
                num_samples=search.trials,
                scheduler=scheduler,
                search_alg=draws,
                max_concurrent_trials=concurrent,
                trial_name_creator=_trial_name,
                trial_dirname_creator=_trial_name,
            ),
            run_config=ray_tune.RunConfig(
                name=STATE,
                storage_path=state,
                callbacks=[progress_of(search.metric, search.mode, search.trials, display)],
                verbose=0,
                **files,
            ),
        )
    with default_env({"RAY_AIR_NEW_OUTPUT": "0"}):  # otherwise Ray prints its own tables and hints
        return tuner.fit()


def _train_one(
    config: TrainConfig, values: Mapping[str, Any], metric: str, factory: Factory | None, callbacks: Sequence[Callback]
) -> None:
    """Run one trial in its Ray Tune process."""
    from ray import tune as ray_tune

    from rayrec.train.trainer import Trainer

    name = ray_tune.get_context().get_trial_name()
    trial = {**with_values(config.to_dict(), values), "name": name}
    trial["storage"] = {**trial["storage"], "path": folder_of(config)}
    trial["trainer"] = {**trial["trainer"], "trackers": []}  # they are among the callbacks
    reports = _Reports(metric)
    result = _when_free(Trainer(parse_config(trial), factory=factory, display=reports, callbacks=callbacks).fit)
    if not reports.count and result.eval is not None:  # the run finished before an interruption, but was not reported
        reports.evaluation(result.eval)
    if reports.problem is not None:
        raise reports.problem


def _when_free(fit: Callable[[], Result]) -> Result:
    """Call `fit` when the run folder is free: trials of a killed search may run for some more seconds."""
    until = time.monotonic() + OUTLIVES_S
    while True:
        try:
            return fit()
        except RunInUseError:
            if time.monotonic() >= until:
                raise
        time.sleep(1.0)


def _trial_name(trial: Any) -> str:
    return f"trial-{trial.trial_id}"


def folder_of(config: TrainConfig) -> str:
    """Folder or URI of the search: `<storage.path>/<name>-tune`."""
    base, mark, options = config.storage.path.partition("?")
    return f"{base.rstrip('/')}/{config.name}-tune{mark}{options}"


def _state_of(folder: str) -> tuple[str, dict[str, Any]]:
    """Storage path of Ray Tune's state, and the `storage_filesystem` argument if it is a URI."""
    if "://" not in folder:
        return folder, {}
    files, path = open_filesystem(folder)
    return path, {"storage_filesystem": files}


def _first_values(config: TrainConfig, space: Mapping[str, Any], factory: Factory | None) -> dict[str, Any]:
    """The values that the config trains with, written or by default, of the fields whose space contains them."""
    raw = config.to_dict()
    tables = {table.name: config.optimizers.of_table(table.name) for table in config.tables}
    raw["optimizers"]["tables"] = {name: optimizer.model_dump(mode="json") for name, optimizer in tables.items()}
    if any(field.startswith("model.args.") for field in space):
        raw["model"]["args"] = build.all_args(config, factory)
    values = {field: value_at(raw, field) for field in space}
    return {field: value for field, value in values.items() if holds(space[field], value)}


def _draws(search: Search, config: TrainConfig, space: Mapping[str, Any], factory: Factory | None = None) -> Any:
    """The search algorithm. The first trial uses the values of the config, as far as the space contains them.

    Raises:
        TrainError: an unknown algorithm, its package is not installed, or the model cannot be imported.
    """
    initial = [values] if (values := _first_values(config, space, factory)) else []
    if search.algorithm == "random":
        from ray.tune.search.basic_variant import BasicVariantGenerator

        return BasicVariantGenerator(random_state=search.seed, points_to_evaluate=initial)
    if search.algorithm != "optuna":
        raise TrainError(f"search={search.algorithm!r}: allowed: random, optuna")
    if importlib.util.find_spec("optuna") is None:
        raise TrainError("search=optuna: not installed; pip install rayrec[search]")
    import optuna
    from ray.tune.search.optuna import OptunaSearch

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    # Optuna accepts complete points only.
    return OptunaSearch(seed=search.seed, points_to_evaluate=initial if len(values) == len(space) else [])


def _trials(results: Any, search: Search) -> list[Trial]:
    trials = []
    for result in results:
        frame = result.metrics_dataframe
        scores = (
            [] if frame is None or search.metric not in frame else [float(v) for v in frame[search.metric].dropna()]
        )
        best = (min if search.mode == "min" else max)(scores) if scores else None
        name = Path(result.path).name
        error = None if result.error is None else _last_line(result.error)
        trials.append(Trial(name=name, values=result.config, score=best, evaluations=len(scores), error=error))
    sign = 1 if search.mode == "min" else -1
    return sorted(trials, key=lambda trial: (trial.score is None, sign * (trial.score or 0.0), trial.name))


def _last_line(error: BaseException) -> str:
    cause = getattr(error, "cause", None) or error
    lines = str(cause).strip().splitlines() or [type(cause).__name__]
    return lines[-1]


def _write(folder: str, raw: Mapping[str, Any], search: Search, trials: Sequence[Trial]) -> None:
    records = [{"trial": t.name, **t.__dict__} for t in trials]
    files = open_folder(folder)
    summary = {"metric": search.metric, "mode": search.mode, "trials": records}
    files.write("trials.json", json.dumps(summary, indent=2).encode())
    if trials and trials[0].score is not None:
        best = {**with_values(raw, trials[0].values), "name": raw["name"]}
        files.write("best.yaml", yaml.safe_dump(best, sort_keys=False, allow_unicode=True).encode())
