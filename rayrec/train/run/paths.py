"""Makes relative paths of a config absolute, also in a Ray job, whose working folder is temporary."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError


def resolved(config: TrainConfig, root: Path | None = None) -> TrainConfig:
    """The config with absolute paths; URIs are unchanged.

    Args:
        root: base of relative paths; default: the working folder. Ray deletes its copy of a job's `--working-dir`
            after the job, so without a root a relative `storage.path` of a job is resolved in the home folder.

    Raises:
        TrainError: in a job, a relative data path is not in the submitted working folder.
    """
    here = root or Path.cwd()
    home = Path.home() / "rayrec" if root is None and in_job_package(here) else here
    raw = config.to_dict()
    sets = {field: raw["data"][field] for field in ("train", "eval", "test")}
    sets |= {f"eval_sets.{name}": one for name, one in raw["data"]["eval_sets"].items()}
    if root is None and in_job_package(here):
        for field, given in sets.items():
            for data in _sections(given):
                _refuse_left_behind(data["path"], f"data.{field}", here)
    for data in (one for given in sets.values() for one in _sections(given)):
        data["path"], data["index"] = _absolute(data["path"], here), _absolute(data["index"], here)
    for field in ("plan", "calibration"):
        raw["sharding"][field] = _absolute(raw["sharding"][field], here)
    raw["storage"]["path"] = _absolute(raw["storage"]["path"], home)
    if raw["init_from"] is not None:
        raw["init_from"]["path"] = _absolute(raw["init_from"]["path"], home)
    found = TrainConfig(**raw)
    return found.model_copy(update={"data_schema": found.data_schema.with_paths_from(here)})


def in_job_package(folder: Path) -> bool:
    """Whether a folder is Ray's copy of a job's `--working-dir`."""
    return any(part.startswith("_ray_pkg_") for part in folder.parts)


def _sections(data: Any) -> list[dict[str, Any]]:
    """The data set sections in a field that holds one data set, a mix, or null."""
    return data if isinstance(data, list) else [] if data is None else [data]


def _refuse_left_behind(path: Any, field: str, here: Path) -> None:
    for one in path if isinstance(path, list) else [path]:
        relative = "://" not in one and not Path(one).expanduser().is_absolute()
        if relative and not any(here.glob(one)):
            raise TrainError(
                f"{field}: {one} is not in the job's copy of the working folder, which leaves out what git ignores; "
                f"name a path that every node sees (--set {field}=/…, or --root FOLDER for all relative paths), or "
                f"submit with RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 to send all files along"
            )


def _absolute(path: Any, root: Path) -> Any:
    if isinstance(path, list):
        return [_absolute(one, root) for one in path]
    if path is None or "://" in path:
        return path
    return str((root / Path(path).expanduser()).absolute())
