"""Callbacks that send a run's figures to MLflow, Weights & Biases or Comet, by the clients of those packages."""

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
from rayrec.train.run.log import figures_of

if TYPE_CHECKING:
    from rayrec.train.run.result import Result

RUN_TAG = "rayrec.run"


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
