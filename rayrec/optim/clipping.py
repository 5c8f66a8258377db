"""Gradients kept within bounds before an optimizer uses them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Any

import torch

from rayrec.optim.keyed import KeyedOptimizer, OptimizerWrapper
from rayrec.optim.optimizers import GATHER


class GradientClipping(Enum):
    """What is bounded: the norm of all gradients together, each number, or nothing."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Bounds the gradients of the inner optimizer's parameters, then lets it step.

    Dense gradients are averaged over ranks before `step`, so all ranks clip alike. Every rank holds a part of the
    sharded tables with a dense kernel: their norm is taken over all ranks, by one gather of a number. Tables whose
    update is fused into backward have no gradient left here and are not clipped.

    Args:
        optimizer: the one that steps.
        clipping: what is bounded.
        max_gradient: the bound.
        norm_type: p of the norm; `float("inf")` for the largest number.

    Raises:
        ValueError: a bound that is not positive.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NORM,
        max_gradient: float = 1.0,
        norm_type: float = 2.0,
    ) -> None:
        super().__init__(optimizer)
        if max_gradient <= 0:
            raise ValueError(f"gradient clipping: max_gradient={max_gradient} must be positive")
        self._clipping = clipping
        self._max_gradient = max_gradient
        self._norm_type = norm_type

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [param for param in self.params.values() if param.grad is not None]
        match self._clipping:
            case GradientClipping.NORM:
                norm = _norm_over_ranks(list(self.params.values()), self._norm_type)
                torch.nn.utils.clip_grads_with_norm_(params, self._max_gradient, norm)
            case GradientClipping.VALUE:
                torch.nn.utils.clip_grad_value_(params, self._max_gradient)
            case GradientClipping.NONE:
                pass
        super().step(closure)


def _norm_over_ranks(params: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """The norm of all gradients; of shards, those of every rank. A norm of parts' norms is the norm of the whole."""
    shards = [param for param in params if hasattr(param, GATHER)]
    whole = torch.nn.utils.get_total_norm(_grads(param for param in params if not hasattr(param, GATHER)), norm_type)
    if not shards:
        return whole
    mine = torch.nn.utils.get_total_norm(_grads(shards), norm_type).to(shards[0].device, torch.float32)
    parts = getattr(shards[0], GATHER)(mine)
    return torch.linalg.vector_norm(torch.cat([whole.to(parts)[None], parts]), norm_type)


def _grads(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [param.grad for param in params if param.grad is not None]
