"""Reads the config of a run, and restricts the code that a config may import.

A run folder lies in shared storage, where others may write, so a config read from it may not name code to import. A
config passed to `rayrec train` is trusted. In a Ray job, the config and the submitted working folder are trusted, but
not the other modules installed on the cluster.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.run.folder import RunFolder
from rayrec.train.run.paths import in_job_package


def config_of_run(folder: RunFolder, *, allow_code: bool, data: str | None = None) -> dict[str, Any]:
    """The plain values of a run's `config.yaml`.

    Args:
        data: evaluation rows that replace those of the run (`data.eval`, or the next period of progressive training).
        allow_code: permit the config to name code to import. Also set it if the caller passes a factory instead.

    Raises:
        TrainError: not a run folder, or it names code without `allow_code`.
    """
    raw = folder.read_config()
    if raw is None:
        raise TrainError(f"{folder.path} is not a run folder: it has no config.yaml")
    named = None if allow_code else _code_in(raw)
    if named is not None:
        raise TrainError(
            f"{folder.config} names code of its own, {named}, which would be imported and run here; "
            f"if you trust who wrote that folder, give --allow-code (from Python: allow_code=True, or factory=…)"
        )
    if data is not None:
        raw["data"] |= {"eval": data, "progressive": None}
    return raw


def _code_in(raw: dict[str, Any]) -> str | None:
    """The first field that names code to import, except metrics of torchmetrics; None if there is none."""
    model, trainer = (part if isinstance(part := raw.get(name), dict) else {} for name in ("model", "trainer"))
    if model.get("factory") is not None:
        return f"model.factory={model['factory']}"
    metrics = trainer.get("metrics")
    named = [one.get("factory") for one in metrics if isinstance(one, dict)] if isinstance(metrics, list) else []
    own = [path for path in named if not str(path).startswith("torchmetrics.")]
    return f"trainer.metrics: {own[0]}" if own else None


def refuse_code_from_elsewhere(config: TrainConfig, here: Path, *, allow_code: bool) -> None:
    """In a Ray job, refuse model and metric factories outside the submitted working folder. Does not import them.

    Args:
        here: the working folder. Nothing is refused unless it is Ray's copy of a job's working folder.

    Raises:
        TrainError: the module lies elsewhere; names the flag that allows it.
    """
    if allow_code or not in_job_package(here):
        return
    named = [("model.factory", config.model.factory)]
    named += [(f"trainer.metrics.{metric.name}.factory", metric.factory) for metric in config.trainer.metrics]
    for field, path in named:
        if path is not None and not path.startswith("torchmetrics."):
            _refuse_elsewhere(field, path, here)


def _refuse_elsewhere(field: str, path: str, here: Path) -> None:
    package = path.partition(":")[0].partition(".")[0]
    if any((here / name).exists() for name in (package, f"{package}.py")):
        return
    spec = importlib.util.find_spec(package)
    where = "nowhere" if spec is None else spec.origin or "in Python itself"
    raise TrainError(
        f"{field}={path}: {package!r} is not in the job's working folder but {where}; submit it "
        f"with --working-dir, or give --allow-code if it is to be imported from there"
    )
