"""The result of a run, as stored in `result.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The result of a run, as stored in `result.json`.

    Args:
        folder: the run folder.
        eval: `auc`, `ne`, `logloss`, `calibration`, `samples` of the last evaluation; None without evaluation data.
            With several labels, these are the metrics of the first label, and `tasks` has the metrics of each.
        train: metrics of the last logged step, and rows and seconds of the whole training.
        checkpoint: folder of the last checkpoint.
        recoveries: number of times a lost worker group was replaced in the launch that finished the run.
        ended: why the run ended before its last epoch; None if it did not.
        limit: the limit that ended it: `max_steps` or `max_minutes` with its value. A larger one continues the run.
        warnings: one line per warning.
        test: metrics on `data.test`, and `step` and `checkpoint` of the evaluated checkpoint: the best one if
            `storage.keep_best` is set, else the last one.
        best: `metric`, `value`, `step` and `checkpoint` selected by `storage.keep_best`; None without one.
    """

    folder: Path
    eval: dict[str, Any] | None
    train: dict[str, Any]
    world_size: int
    epochs: int
    steps: int
    samples_per_second: float
    checkpoint: str | None
    recoveries: int = 0
    ended: str | None = None
    limit: dict[str, float] | None = None
    warnings: tuple[str, ...] = ()
    best: dict[str, Any] | None = None
    test: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """The content of `result.json`."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "folder"}

    @classmethod
    def from_dict(cls, folder: Path, raw: Mapping[str, Any]) -> Result:
        return cls(folder=folder, **{**raw, "warnings": tuple(raw.get("warnings", ()))})
