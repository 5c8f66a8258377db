"""Bases of optimizers that run inside backward, and of modules that have one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from rayrec.optim.keyed import KeyedOptimizer


class FusedOptimizer(KeyedOptimizer, ABC):
    """An optimizer that has updated its parameters in backward when `step` is called."""

    @abstractmethod
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Takes up settings that were changed."""

    @abstractmethod
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Takes up settings that were changed."""


class EmptyFusedOptimizer(FusedOptimizer):
    """Of a module without fused parameters."""

    def __init__(self) -> None:
        super().__init__({}, {}, [])

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Nothing to do."""

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing to do."""


class FusedOptimizerModule(ABC):
    """A module whose parameters are trained in backward."""

    @property
    @abstractmethod
    def fused_optimizer(self) -> KeyedOptimizer:
        """The optimizer."""
