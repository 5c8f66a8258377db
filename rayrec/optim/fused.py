"""The base class of optimizers that run inside backward."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rayrec.optim.keyed import KeyedOptimizer


class FusedOptimizer(KeyedOptimizer, ABC):
    """An optimizer that updates its parameters in backward, before `step` is called."""

    @abstractmethod
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Applies changed settings."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Applies changed settings."""
