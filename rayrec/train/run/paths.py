"""Makes relative paths of a config absolute. The working folder of a Ray job is temporary."""

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
    base = root or Path.cwd()
    in_job = root is None and in_job_package(base)
    home = Path.home() / "rayrec" if in_job else base
    raw = config.to_dict()
    fields = {field: raw["data"][field] for field in ("train", "eval", "test")}
    fields |= {f"eval_sets.{name}": section for name, section in raw["data"]["eval_sets"].items()}
    for field, value in fields.items():
        for data in _sections(value):
            if in_job:
                _refuse_left_behind(data["path"], f"data.{field}", base)
            data["path"], data["index"] = _absolute(data["path"], base), _absolute(data["index"], base)
    for table in raw["tables"]:
        if isinstance(table["init"], dict):
            if in_job:
                _refuse_left_behind(table["init"]["path"], f"tables.{table['name']}.init.path", base)
            table["init"]["path"] = _absolute(table["init"]["path"], base)
    tables = [(f"data.{kind}.{n}", table) for kind in ("entities", "events") for n, table in raw["data"][kind].items()]
    tables += [(f"schema.derived.{spec['name']}", spec) for spec in raw["schema"]["derived"] if "path" in spec]
    for field, table in tables:
        if in_job:
            _refuse_left_behind(table["path"], f"{field}.path", base)
        table["path"] = _absolute(table["path"], base)
    if (follow := raw["data"]["follow"]) is not None:
        follow["backfill"] = _absolute(follow["backfill"], base)
        if follow["join"] is not None:
            follow["join"]["events"] = _absolute(follow["join"]["events"], base)
    for field in ("plan", "calibration"):
        raw["sharding"][field] = _absolute(raw["sharding"][field], base)
    raw["storage"]["path"] = _absolute(raw["storage"]["path"], home)
    if raw["init_from"] is not None:
        raw["init_from"]["path"] = _absolute(raw["init_from"]["path"], home)
        raw["init_from"]["ids"] = {name: _absolute(path, base) for name, path in raw["init_from"]["ids"].items()}
    absolute = TrainConfig(**raw)
    return absolute.model_copy(update={"data_schema": absolute.data_schema.with_paths_from(base)})


def in_job_package(folder: Path) -> bool:
    """Whether a folder is Ray's copy of a job's `--working-dir`."""
    return any(name.startswith("_ray_pkg_") for name in folder.parts)


def _sections(data: Any) -> list[dict[str, Any]]:
    """The data set sections in a field that holds one data set, a mix, or null."""
    return data if isinstance(data, list) else [] if data is None else [data]


def _refuse_left_behind(path: Any, field: str, here: Path) -> None:
    for pattern in path if isinstance(path, list) else [path]:
        relative = "://" not in pattern and not Path(pattern).expanduser().is_absolute()
        if relative and not any(here.glob(pattern)):
            raise TrainError(
                f"{field}: {pattern} is not in the job's copy of the working folder, which omits git-ignored files; "
                f"name a path that every node sees (--set {field}=/…, or --root FOLDER for all relative paths), or "
                f"submit with RAY_RUNTIME_ENV_IGNORE_GITIGNORE=1 to send all files along"
            )


def _absolute(path: Any, root: Path) -> Any:
    if isinstance(path, list):
        return [_absolute(item, root) for item in path]
    if path is None or "://" in path:
        return path
    return str((root / Path(path).expanduser()).absolute())
