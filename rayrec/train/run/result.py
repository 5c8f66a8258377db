"""How a run ended: `Result`, the same as its `result.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How a run ended; the same as its `result.json`.

    Args:
        folder: the run folder.
        eval: `auc`, `ne`, `logloss`, `calibration`, `samples` of the last evaluation; of several labels those of the
            first, and all by name in `tasks`; None without evaluation data.
        train: figures of the last logging step, and rows and seconds of the whole training.
        checkpoint: folder of the last checkpoint.
        recoveries: how often a lost worker group was replaced in the launch that finished the run.
        ended: why the run ended before its last epoch, if it did.
        warnings: what is odd though nothing failed, a line each.
        test: figures of the trained model on `data.test`.
        best: `metric`, `value`, `step` and `checkpoint` of the one that `storage.keep_best` kept, if there is one.
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
    warnings: tuple[str, ...] = ()
    best: dict[str, Any] | None = None
    test: dict[str, Any] | None = None

    def to_dict(self) -> dict[str, Any]:
        """What `result.json` holds."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "folder"}

    @classmethod
    def from_dict(cls, folder: Path, raw: Mapping[str, Any]) -> Result:
        return cls(folder=folder, **{**raw, "warnings": tuple(raw.get("warnings", ()))})
