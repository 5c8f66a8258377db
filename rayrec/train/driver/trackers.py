"""What sends a run's figures elsewhere: to MLflow, Weights & Biases or Comet, by the clients of those packages, and to
Prometheus, through Ray's own metrics: `ray_rayrec_…` of the driver's process, which `deploy/grafana-dashboard.json`
draws. Memory and processors of the workers are among what Ray itself exports.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rayrec.storage.errors import suggestion
from rayrec.train.config.difference import flat
from rayrec.train.driver.callbacks import Callback, RunInfo
from rayrec.train.errors import TrainError
from rayrec.train.run.log import Record, figures_of

if TYPE_CHECKING:
    from rayrec.train.run.result import Result

RUN_TAG = "rayrec.run"
# Name → what it is.
GAUGES = {
    "rayrec_step": "Steps made.",
    "rayrec_epoch": "The epoch that is trained on, from 1.",
    "rayrec_workers": "Workers of the group.",
    "rayrec_restarts": "How often a worker group was started again in this launch.",
    "rayrec_samples_per_second": "Rows a second over all workers, between two logging steps.",
    "rayrec_step_seconds": "Seconds a step took, between two logging steps.",
    "rayrec_data_wait_fraction": "The part of the training time that was spent waiting for data.",
    "rayrec_stall_fraction": "The part of the time in which training stood still for checkpoints and evaluations.",
    "rayrec_loss": "Loss between two logging steps.",
    "rayrec_ne": "Normalized entropy between two logging steps.",
    "rayrec_auc": "AUC between two logging steps.",
    "rayrec_eval_ne": "Normalized entropy of the last evaluation.",
    "rayrec_eval_auc": "AUC of the last evaluation.",
    "rayrec_checkpoint_time_seconds": "When the last checkpoint was complete, in Unix time.",
}
TAG = "run"


def _id_of(run: RunInfo) -> str:
    """The same for a run that goes on, so that its figures go on too."""
    return hashlib.sha256(str(run.folder).encode()).hexdigest()[:32]


class _Tracker(Callback):
    """Hands figures to `log`."""

    def on_step(self, record: Mapping[str, Any]) -> None:
        self.log(figures_of(record), int(record["step"]))

    on_evaluation = on_step

    def log(self, figures: dict[str, float], step: int) -> None:
        raise NotImplementedError


class MLflow(_Tracker):
    """Figures, settings and the report in MLflow.

    Args:
        experiment: its name; it is made where there is none.
        uri: of the server or store; None: as MLflow is set up (`MLFLOW_TRACKING_URI`).
    """

    def __init__(self, experiment: str = "rayrec", uri: str | None = None) -> None:
        self._experiment, self._uri = experiment, uri

    def on_start(self, run: RunInfo) -> None:
        from mlflow import MlflowClient

        self._client: Any = MlflowClient(self._uri)
        self._folder: Path = run.folder
        found = self._client.get_experiment_by_name(self._experiment)
        experiment = self._client.create_experiment(self._experiment) if found is None else found.experiment_id
        tag = _id_of(run)
        earlier = self._client.search_runs([experiment], f"tags.`{RUN_TAG}` = '{tag}'", max_results=1)
        made = earlier[0] if earlier else self._client.create_run(experiment, run_name=run.name, tags={RUN_TAG: tag})
        self._run_id = made.info.run_id
        for name, value in {} if earlier else flat(run.config.to_dict()).items():
            self._client.log_param(self._run_id, name, str(value)[:500])

    def log(self, figures: dict[str, float], step: int) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._run_id, name.replace("@", "_at_"), value, step=step)

    def on_end(self, result: Result | None, error: Exception | None) -> None:
        if (report := self._folder / "report.html").is_file():
            self._client.log_artifact(self._run_id, str(report))
        self._client.set_terminated(self._run_id, "FINISHED" if error is None else "FAILED")


class WandB(_Tracker):
    """Figures and settings in a project of Weights & Biases; `WANDB_MODE=offline` keeps them in the run folder."""

    def __init__(self, project: str = "rayrec") -> None:
        self._project = project

    def on_start(self, run: RunInfo) -> None:
        import wandb

        self._run: Any = wandb.init(
            project=self._project,
            name=run.name,
            id=_id_of(run),
            dir=str(run.folder),
            resume="allow",
            config=run.config.to_dict(),
        )

    def log(self, figures: dict[str, float], step: int) -> None:
        self._run.log(figures, step=step)

    def on_end(self, result: Result | None, error: Exception | None) -> None:
        self._run.finish(exit_code=0 if error is None else 1)


class Comet(_Tracker):
    """Figures and settings in a project of Comet."""

    def __init__(self, project: str = "rayrec") -> None:
        self._project = project

    def on_start(self, run: RunInfo) -> None:
        import comet_ml

        self._run: Any = comet_ml.start(project_name=self._project, experiment_key=_id_of(run))
        self._run.set_name(run.name)
        self._run.log_parameters(flat(run.config.to_dict()))

    def log(self, figures: dict[str, float], step: int) -> None:
        self._run.log_metrics(figures, step=step)

    def on_end(self, result: Result | None, error: Exception | None) -> None:
        self._run.end()


# Name → the package that must be installed.
PACKAGES = {"mlflow": "mlflow", "wandb": "wandb", "comet": "comet_ml"}


def tracker(name: str, project: str) -> Callback:
    """The tracker of this name, for `--track`; `project` is MLflow's experiment, the project of the others.

    Raises:
        TrainError: there is no such tracker, or its package is not installed.
    """
    if name not in PACKAGES:
        raise TrainError(f"track={name!r}: there are {', '.join(PACKAGES)}{suggestion(name, list(PACKAGES))}")
    if importlib.util.find_spec(PACKAGES[name]) is None:
        raise TrainError(f"track={name}: not installed; pip install {PACKAGES[name]}")
    if name == "mlflow":
        import mlflow

        return MLflow(project, mlflow.get_tracking_uri())  # absolute: a trial works in a folder of its own
    return WandB(project) if name == "wandb" else Comet(project)


class ExportedMetrics:
    """Sets the gauges from a run's records; needs a connected Ray.

    Args:
        run: the run's name.
        batch_size: rows of a step over all workers.
    """

    def __init__(self, run: str, batch_size: int) -> None:
        from ray.util.metrics import Gauge

        self._gauges = {name: Gauge(name, description=text, tag_keys=(TAG,)) for name, text in GAUGES.items()}
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
            case "eval":
                self._set({f"eval_{name}": record.get(name) for name in ("ne", "auc")})
            case "event" if record["event"] == "checkpoint":
                self._set({"checkpoint_time_seconds": record["time"]})

    def _set(self, values: Mapping[str, Any]) -> None:
        """What a model has no figure of keeps none."""
        for name, value in values.items():
            if value is not None:
                self._gauges[f"rayrec_{name}"].set(float(value))
