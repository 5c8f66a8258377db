"""`torchrec.optim.fused`: optimizers that run in the backward pass, and modules with one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rayrec.optim import KeyedOptimizer

__all__ = ["EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule"]


class FusedOptimizer(KeyedOptimizer, ABC):
    """An optimizer that updates its parameters in the backward pass."""

    @abstractmethod
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Applies changed settings."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Applies changed settings."""


class EmptyFusedOptimizer(FusedOptimizer):
    """The optimizer of a module without fused parameters."""

    def __init__(self) -> None:
        super().__init__({}, {}, [])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing to do."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do."""


class FusedOptimizerModule(ABC):
    """A module with parameters that are updated in the backward pass."""

    @property
    @abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer of the module."""
