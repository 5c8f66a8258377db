"""Reads the config of a run, and restricts the code that a config may import.

A run folder is in shared storage, where other users may write. A config read from it may therefore not name code to
import. A config passed to `rayrec train` is trusted. In a Ray job, the config and the submitted working folder are
trusted, but not the other modules installed on the cluster.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.run.folder import RunFolder
from rayrec.train.run.paths import in_job_package

# Options of `sharding` for an evaluation: without replicas, which it does not need, and without the plan and the
# calibration, which are for the workers that train.
EVALUATION_SHARDING: dict[str, Any] = {"replicas": 1, "plan": None, "calibration": None}


def config_of_run(folder: RunFolder, *, allow_code: bool, data: str | None = None) -> dict[str, Any]:
    """The plain values of a run's `config.yaml`.

    Args:
        data: evaluation rows instead of the run's `data.eval` or, in progressive training, its next period.
        allow_code: permit the config to name code to import. Set it also if the caller passes a factory.

    Raises:
        TrainError: not a run folder, or its config names code and `allow_code` is not set.
    """
    raw = folder.read_config()
    if raw is None:
        raise TrainError(f"{folder.path} is not a run folder: it has no config.yaml")
    named = None if allow_code else _code_in(raw)
    if named is not None:
        raise TrainError(
            f"{folder.config} names code, {named}, which would be imported and run here; "
            f"if you trust the author of this folder, pass --allow-code (from Python: allow_code=True, or factory=…)"
        )
    if data is not None:
        raw["data"] |= {"eval": data, "progressive": None, "order": None, "windows": None}
    reopen_files()
    return raw


def reopen_files() -> None:
    """Makes this process open vocabularies and entities anew, which may have changed since its last use of them."""
    from rayrec.data.mapping.entities import close_entities
    from rayrec.data.mapping.vocabulary import close_vocabularies

    close_entities()
    close_vocabularies()


def _code_in(raw: dict[str, Any]) -> str | None:
    """The first field that names code to import, except metrics of torchmetrics; None without one."""
    model, trainer = (section if isinstance(section := raw.get(name), dict) else {} for name in ("model", "trainer"))
    if model.get("factory") is not None:
        return f"model.factory={model['factory']}"
    if trainer.get("on_batch") is not None:
        return f"trainer.on_batch={trainer['on_batch']}"
    metrics = trainer.get("metrics")
    paths = [item.get("factory") for item in metrics if isinstance(item, dict)] if isinstance(metrics, list) else []
    restricted = [path for path in paths if not str(path).startswith("torchmetrics.")]
    return f"trainer.metrics: {restricted[0]}" if restricted else None


def refuse_code_from_elsewhere(config: TrainConfig, here: Path, *, allow_code: bool) -> None:
    """In a Ray job, refuse models, metrics and functions from outside the submitted working folder; imports none.

    Args:
        here: the working folder. The check applies only if it is Ray's copy of a job's working folder.

    Raises:
        TrainError: the module is not in the working folder; the message names the flag that allows it.
    """
    if allow_code or not in_job_package(here):
        return
    named = [("model.factory", config.model.factory)]
    named += [(f"trainer.metrics.{metric.name}.factory", metric.factory) for metric in config.trainer.metrics]
    named += [("trainer.on_batch", config.trainer.on_batch)]
    for field, path in named:
        if path is not None and not path.startswith("torchmetrics."):
            _refuse_elsewhere(field, path, here)


def _refuse_elsewhere(field: str, path: str, here: Path) -> None:
    package = path.partition(":")[0].partition(".")[0]
    if any((here / name).exists() for name in (package, f"{package}.py")):
        return
    spec = importlib.util.find_spec(package)
    origin = "not installed" if spec is None else f"installed at {spec.origin}" if spec.origin else "built into Python"
    raise TrainError(
        f"{field}={path}: {package!r} is not in the job's working folder ({origin}); submit it with --working-dir, or "
        f"pass --allow-code to import the installed module"
    )
