"""Ends a run before its last epoch: if evaluations do not improve, or if metrics show that the model does not learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rayrec.optim.config import PlateauConfig
from rayrec.train.config.trainer import EarlyStoppingConfig, GuardsConfig, lower_is_better
from rayrec.train.worker.lockstep import RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation so far.

    Args:
        value: value of the metric; None before the first evaluation.
        step: step of the best evaluation.
        stale: number of evaluations since then.
    """

    value: float | None = None
    step: int = 0
    stale: int = 0

    def after(
        self,
        scores: Mapping[str, Any],
        step: int,
        config: EarlyStoppingConfig | PlateauConfig,
        own: Sequence[Mapping[str, Any]] = (),
    ) -> Best:
        """The best evaluation after one more; unchanged if the step was already counted.

        Args:
            own: `trainer.metrics`, as plain values.
        """
        value = scores.get(config.metric)
        if step <= self.step and self.value is not None:
            return self
        sign = -1 if lower_is_better(config.metric, own) else 1
        if value is not None and (self.value is None or sign * (value - self.value) > config.min_delta):
            return Best(value=value, step=step)
        return replace(self, stale=self.stale + 1)

    def end(self, config: EarlyStoppingConfig) -> str | None:
        """The reason to end the run; None: continue."""
        if self.stale < config.patience:
            return None
        best = "was never defined" if self.value is None else f"is best at step {self.step} ({self.value:.4f})"
        return f"{config.metric} {best} and has not improved in {self.stale} evaluations (trainer.early_stopping)"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any] | None) -> Best:
        return cls(**raw) if raw else cls()


@dataclass(slots=True)
class Guards:
    """Counts consecutive logging lines with a bad metric."""

    config: GuardsConfig
    in_a_row: dict[str, int] = field(default_factory=dict)

    def check(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Check the metrics of a logging line. The metrics cover all ranks, so every rank decides the same.

        Raises:
            RankError: too many bad lines in a row.
        """
        config = self.config
        if step <= config.after_steps:
            return
        ne, auc = metrics.get("ne"), metrics.get("auc")
        high = config.max_ne is not None and ne is not None and ne > config.max_ne
        # The true area may be larger than the figure of narrow logits by as much as `auc_error`.
        highest = None if auc is None else auc + metrics.get("auc_error", 0.0)
        low = config.min_auc is not None and highest is not None and highest < config.min_auc
        self._count(
            "max_ne",
            high,
            step,
            f"NE {ne} is above {config.max_ne}: no better than a constant; lower the learning rates",
        )
        self._count("min_auc", low, step, f"AUC {auc} is below {config.min_auc}: the model cannot separate the labels")

    def _count(self, name: str, bad: bool, step: int, text: str) -> None:
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1 if bad else 0
        if self.in_a_row[name] >= self.config.patience:
            times = self.in_a_row[name]
            raise RankError(
                f"ended early at step {step} after {times} logging lines in a row: {text} (trainer.guards.{name})"
            )
