"""The sections `storage` and `init_from` of a train config."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_serializer, field_validator

from rayrec._runtime.interval import IntervalField
from rayrec._runtime.strict import Section


class InitFromConfig(Section):
    """Initial weights for a new run, matched by table and layer name. Optimizer state is not loaded."""

    path: str = Field(min_length=1, description="run folder (uses its newest checkpoint) or checkpoint; a path or URI")
    renames: dict[str, str] = Field(default={})
    """name in the checkpoint → name in this run, for a table, a layer, or a whole module"""
    fresh: list[str] = Field(
        default=[], description="tables, layers and modules of this run to initialize randomly instead"
    )
    ids: dict[str, str] = Field(default={})
    """feature with dynamic ids → vocabulary (`rayrec data vocabulary`) of the ids that take over their rows; needed if
    the feature was hashed in that run"""


class KeepBestConfig(Section):
    """The best checkpoints, which are kept."""

    metric: str = Field(min_length=1, description="evaluation metric, built-in or from `trainer.metrics`")
    count: int = Field(default=1, ge=1, description="number of best checkpoints to keep")


class IncrementsConfig(Section):
    """Checkpoints between the full ones, of only what changed since the one before: small, so they can be frequent."""

    every: IntervalField = Field(description="interval between increments: steps, or a duration such as `60s`")


class StorageConfig(Section):
    """Where a run is stored."""

    path: str = Field(default="runs", min_length=1)
    """folder of runs, shared by all nodes on a cluster; or a URI, e.g. `s3://bucket/runs`"""
    keep: int = Field(default=3, ge=1, description="number of newest checkpoints to keep")
    keep_best: KeepBestConfig | None = None
    """also keep the best checkpoints; a metric alone is short for `{metric: …}`; saves a checkpoint at each
    evaluation"""
    increments: IncrementsConfig | None = None
    """also save what changed since the last checkpoint, e.g. `{every: 60s}`; a run resumes from the newest increment; a
    full checkpoint comes instead where the increments since the last one have half of its bytes"""
    background: bool = True
    """write checkpoints in the background: copy them to host memory if it suffices (on CPUs, one fortieth per rank)
    while training continues; `false`: training waits for each write"""
    patience_s: float = Field(default=600.0, ge=0)
    """maximum seconds to wait for unavailable storage where training cannot continue without it: at the start, after a
    failure, and for the final checkpoint; reported every minute"""

    @field_validator("keep_best", mode="before")
    @classmethod
    def _metric_alone(cls, value: Any) -> Any:
        return {"metric": value} if isinstance(value, str) else value

    @field_serializer("keep_best")
    def _short(self, value: KeepBestConfig | None) -> Any:
        # The short form where it suffices: runs of earlier versions compare as equal.
        return value.metric if value is not None and value.count == 1 else value
