"""Sends a run's metrics to MLflow, Weights & Biases or Comet, and to Prometheus.

Prometheus scrapes them from Ray's metrics of the driver process, as `ray_rayrec_…`; `deploy/grafana-dashboard.json`
plots them. Ray itself exports the memory and CPU use of workers.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec.storage.errors import suggestion
from rayrec.train.config.difference import flat
from rayrec.train.config.trainer import TrackerConfig
from rayrec.train.driver.callbacks import Callback, RunInfo
from rayrec.train.errors import TrainError
from rayrec.train.run.log import Record, metrics_of

if TYPE_CHECKING:
    from rayrec.train.config.train_config import TrainConfig
    from rayrec.train.run.result import Result

RUN_TAG = "rayrec.run"
# Name → description.
GAUGES = {
    "rayrec_step": "Training steps so far.",
    "rayrec_epoch": "Current epoch, counted from 1.",
    "rayrec_workers": "Number of workers.",
    "rayrec_restarts": "Restarts of the worker group since the driver started.",
    "rayrec_samples_per_second": "Rows per second over all workers, between two logging steps.",
    "rayrec_step_seconds": "Seconds per step, between two logging steps.",
    "rayrec_data_wait_fraction": "Fraction of the training time spent waiting for data.",
    "rayrec_stall_fraction": "Fraction of the time in which checkpoints and evaluations stopped training.",
    "rayrec_loss": "Loss between two logging steps.",
    "rayrec_ne": "Normalized entropy between two logging steps.",
    "rayrec_auc": "AUC between two logging steps.",
    "rayrec_eval_ne": "Normalized entropy of the last evaluation.",
    "rayrec_eval_auc": "AUC of the last evaluation.",
    "rayrec_checkpoint_time_seconds": "Unix time when the last checkpoint was completed.",
}
# Of tables with dynamic ids, each with the tag `table`. Name → description.
DYNAMIC_GAUGES = {
    "rayrec_ids_rows_used": "Rows of a table that an id has.",
    "rayrec_ids_rows": "Rows of a table that ids may have.",
    "rayrec_ids_own_share": "Fraction of lookups with a row of their own, between two logging steps.",
    "rayrec_ids_full_share": "Fraction of buckets without a free row.",
    "rayrec_ids_admitted": "Ids that got a row between two logging steps.",
    "rayrec_ids_waiting": "Ids that were not admitted yet, between two logging steps.",
    "rayrec_ids_refused": "Ids that found no row in a full bucket, between two logging steps.",
    "rayrec_ids_evicted": "Ids that lost their row to another id between two logging steps.",
    "rayrec_ids_expired": "Ids that lost their row by age between two logging steps.",
}
TAG, TABLE_TAG = "run", "table"


class _Tracker(Callback):
    """Passes metrics to `log`."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.log(metrics_of(record), int(record["step"]))

    on_evaluation = on_step

    def log(self, metrics: dict[str, float], step: int) -> None:
        raise NotImplementedError


class MLflow(_Tracker):
    """Logs metrics, the config and the report to MLflow.

    Args:
        experiment: name of the experiment; created if missing.
        uri: URI of the tracking server or store; None: MLflow's setting (`MLFLOW_TRACKING_URI`).
        name: name of the entry; None: the name of the run.
    """

    def __init__(self, experiment: str = "rayrec", uri: str | None = None, name: str | None = None) -> None:
        self._experiment, self._uri, self._name = experiment, uri, name

    def on_start(self, run: RunInfo) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(self._uri)
        self._folder: Path = run.folder
        existing = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if existing is None else existing.experiment_id
        earlier = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{run.id}'", max_results=1)
        name, tags = self._name or run.name, {RUN_TAG: run.id}
        entry = earlier[0] if earlier else self._client.create_run(experiment, run_name=name, tags=tags)
        self._run_id = entry.info.run_id
        for key, value in {} if earlier else flat(run.config.to_dict()).items():
            self._client.log_param(self._run_id, key, str(value)[:500])

    def log(self, metrics: dict[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        entries = [Metric(name.replace("@", "_at_"), value, now_ms, step) for name, value in metrics.items()]
        self._client.log_batch(self._run_id, metrics=entries)

    def on_end(self, result: Result | None, error: Exception | None) -> None:
        if (report := self._folder / "report.html").is_file():
            self._client.log_artifact(self._run_id, str(report))
        self._client.set_terminated(self._run_id, "FINISHED" if error is None else "FAILED")


class WandB(_Tracker):
    """Logs metrics and the config to a Weights & Biases project; `WANDB_MODE=offline` keeps them in the run folder."""

    def __init__(self, project: str = "rayrec", name: str | None = None) -> None:
        self._project, self._name = project, name

    def on_start(self, run: RunInfo) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=self._project,
            name=self._name or run.name,
            id=run.id,
            dir=str(run.folder),
            resume="allow",
            config=run.config.to_dict(),
        )
        self._step = 0

    def log(self, metrics: dict[str, float], step: int) -> None:
        # W&B drops a line of an earlier step, such as an evaluation in the background.
        self._step = max(self._step, step)
        evaluated = {} if step == self._step else {"eval/step": float(step)}
        self._run.log({**metrics, **evaluated}, step=self._step)

    def on_end(self, result: Result | None, error: Exception | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)


class Comet(_Tracker):
    """Logs metrics and the config to a Comet project."""

    def __init__(self, project: str = "rayrec", name: str | None = None) -> None:
        self._project, self._name = project, name

    def on_start(self, run: RunInfo) -> None:
        import comet_ml

        self._run: Any = comet_ml.start(project_name=self._project, experiment_key=run.id)
        self._run.set_name(self._name or run.name)
        self._run.log_parameters(flat(run.config.to_dict()))

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._run.log_metrics(metrics, step=step)

    def on_end(self, result: Result | None, error: Exception | None) -> None:
        self._run.end()


# Name → the package that it needs.
PACKAGES = {"mlflow": "mlflow", "wandb": "wandb", "comet": "comet_ml"}


def tracker(kind: str, project: str, name: str | None = None) -> Callback:
    """A tracker, for `trainer.trackers` and `--track`.

    Args:
        project: a project, or an experiment for MLflow.
        name: name of the entry; None: the name of the run.

    Raises:
        TrainError: the kind is unknown, or its package is not installed.
    """
    _check(kind)
    if kind == "mlflow":
        import mlflow

        # An absolute URI, because each trial of a search has its own working directory.
        return MLflow(project, mlflow.get_tracking_uri(), name)
    return WandB(project, name) if kind == "wandb" else Comet(project, name)


def _check(kind: str) -> None:
    if kind not in PACKAGES:
        raise TrainError(f"track={kind!r} must be one of {', '.join(PACKAGES)}{suggestion(kind, list(PACKAGES))}")
    if importlib.util.find_spec(PACKAGES[kind]) is None:
        raise TrainError(f"track={kind}: the package is not installed; run pip install {PACKAGES[kind]}")


def trackers_of(config: TrainConfig) -> list[Callback]:
    """The trackers of `trainer.trackers`.

    Raises:
        TrainError: the package of one is not installed.
    """
    return [tracker(section.kind, section.project, section.name) for section in config.trainer.trackers]


def with_trackers(config: TrainConfig, kinds: Sequence[str]) -> TrainConfig:
    """The config with trackers of these kinds added, unless it has one of the kind.

    Raises:
        TrainError: a kind is unknown, or its package is not installed.
    """
    trackers = list(config.trainer.trackers)
    for kind in kinds:
        _check(kind)
        if kind not in {section.kind for section in trackers}:
            trackers.append(TrackerConfig.model_validate({"kind": kind}))
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"trackers": trackers})})


class ExportedMetrics:
    """Sets Prometheus gauges from the records of a run; needs a connected Ray.

    Args:
        run: the run's name.
        batch_size: rows of a step over all workers.
    """

    def __init__(self, run: str, batch_size: int) -> None:
        from ray.util.metrics import Gauge

        self._gauges = {name: Gauge(name, description=text, tag_keys=(TAG,)) for name, text in GAUGES.items()}
        tags = (TAG, TABLE_TAG)
        self._gauges |= {name: Gauge(name, description=text, tag_keys=tags) for name, text in DYNAMIC_GAUGES.items()}
        for gauge in self._gauges.values():
            gauge.set_default_tags({TAG: run})
        self._batch_size, self._first_attempt = batch_size, -1

    def __call__(self, record: Record) -> None:
        match record["kind"]:
            case "begin":
                if self._first_attempt < 0:
                    self._first_attempt = record["attempt"]
                self._set({"workers": record["world_size"], "restarts": record["attempt"] - self._first_attempt})
            case "train":
                rate = record["samples_per_second"]
                seconds = self._batch_size / rate if rate else None
                self._set({"step": record["step"], "epoch": record["epoch"] + 1, "step_seconds": seconds})
                names = ("samples_per_second", "data_wait_fraction", "stall_fraction", "loss", "ne", "auc")
                self._set({name: record.get(name) for name in names})
                for table, values in record.get("dynamic_ids", {}).items():
                    self._set({f"ids_{name}": value for name, value in values.items()}, {TABLE_TAG: table})
            case "eval":
                self._set({f"eval_{name}": record.get(name) for name in ("ne", "auc")})
            case "event" if record["event"] == "checkpoint":
                self._set({"checkpoint_time_seconds": record["time"]})

    def _set(self, values: Mapping[str, Any], tags: dict[str, str] | None = None) -> None:
        for name, value in values.items():
            if value is not None:
                self._gauges[f"rayrec_{name}"].set(float(value), tags or {})
