"""When a run ends before its last epoch: evaluations that do not get better, or figures that show it learns nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from rayrec.train.config.trainer import EarlyStoppingConfig, GuardsConfig, lower_is_better
from rayrec.train.worker.lockstep import RankError


@dataclass(frozen=True, slots=True, kw_only=True)
class Best:
    """The best evaluation so far.

    Args:
        value: None before the first.
        step: when it was; `stale`: evaluations since.
    """

    value: float | None = None
    step: int = 0
    stale: int = 0

    def after(
        self, scores: Mapping[str, Any], step: int, config: EarlyStoppingConfig, own: Sequence[Mapping[str, Any]] = ()
    ) -> Best:
        """With one more evaluation; one at a step that has been counted changes nothing. `own`: `trainer.metrics`."""
        value = scores.get(config.metric)
        if step <= self.step and self.value is not None:
            return self
        sign = -1 if lower_is_better(config.metric, own) else 1
        if value is not None and (self.value is None or sign * (value - self.value) > config.min_delta):
            return Best(value=value, step=step)
        return replace(self, stale=self.stale + 1)

    def end(self, config: EarlyStoppingConfig) -> str | None:
        """Why the run ends now, if it does."""
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
    """Counts bad lines in a row, by what is bad."""

    config: GuardsConfig
    in_a_row: dict[str, int] = field(default_factory=dict)

    def look(self, step: int, figures: Mapping[str, Any], gradient_norm: float | None) -> None:
        """One logged line of all ranks together, so every rank comes to the same end.

        Args:
            gradient_norm: of the dense parameters; None where there are none.

        Raises:
            RankError: too many bad lines in a row.
        """
        config = self.config
        if step <= config.after_steps:
            return
        ne, auc = figures.get("ne"), figures.get("auc")
        high = config.max_ne is not None and ne is not None and ne > config.max_ne
        low = config.min_auc is not None and auc is not None and auc < config.min_auc
        dead = config.dead_gradients and gradient_norm == 0.0
        self._count("max_ne", high, step, f"NE {ne} is above {config.max_ne}: no better than a constant; lower lr")
        self._count("min_auc", low, step, f"AUC {auc} is below {config.min_auc}: it cannot tell the labels apart")
        why = "all gradients of the dense parameters are 0; look for dead activations or a loss that is constant"
        self._count("dead_gradients", dead, step, why)

    def _count(self, name: str, bad: bool, step: int, text: str) -> None:
        self.in_a_row[name] = self.in_a_row.get(name, 0) + 1 if bad else 0
        if self.in_a_row[name] >= self.config.patience:
            times = self.in_a_row[name]
            raise RankError(
                f"ended early at step {step}, after {times} logged lines in a row: {text} (trainer.guards.{name})"
            )
