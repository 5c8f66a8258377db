"""Reduces the learning rates when evaluations stop improving."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rayrec.optim.config import PlateauConfig
from rayrec.train.worker.guards import Best


@dataclass(frozen=True, slots=True, kw_only=True)
class Plateau:
    """State of `optimizers.plateau`, which every checkpoint stores.

    Args:
        best: the best evaluation so far, and the number of evaluations since then or since the last reduction.
        reductions: number of reductions so far.
    """

    best: Best = field(default_factory=Best)
    reductions: int = 0

    def after(
        self, scores: Mapping[str, Any], step: int, config: PlateauConfig, own: Sequence[Mapping[str, Any]] = ()
    ) -> Plateau:
        """The state after one more evaluation. Metrics are the same on all ranks, so all ranks reduce at once.

        Args:
            own: `trainer.metrics`, as plain values.
        """
        best = self.best.after(scores, step, config, own)
        if best.stale < config.patience:
            return replace(self, best=best)
        return Plateau(best=replace(best, stale=0), reductions=self.reductions + 1)

    def factor(self, config: PlateauConfig | None) -> float:
        """Factor of all learning rates; 1 without a config."""
        return 1.0 if config is None else max(config.min_factor, config.factor**self.reductions)

    def to_dict(self) -> dict[str, Any]:
        return {"best": self.best.to_dict(), "reductions": self.reductions}

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any] | None) -> Plateau:
        return cls() if not raw else cls(best=Best.from_dict(raw["best"]), reductions=raw["reductions"])
