"""Clipping of gradients before the optimizer's step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from rayrec.optim.in_backward import GATHER
from rayrec.optim.keyed import KeyedOptimizer, OptimizerWrapper


class GradientClipping(Enum):
    """Clips the norm of all gradients, each value, or nothing."""

    NORM = "norm"
    VALUE = "value"
    NONE = "none"


class GradientClippingOptimizer(OptimizerWrapper):
    """Clips the gradients of the inner optimizer's parameters before its step.

    Dense gradients are averaged over ranks before `step`, so all ranks clip equally. For sharded tables with a dense
    kernel the norm covers the shards of all ranks, at the cost of one gather of a number. Tables with an update inside
    backward have no gradient and are not clipped.

    Args:
        optimizer: The wrapped optimizer.
        clipping: What to clip.
        max_gradient: The bound; 0 sets all gradients to 0.
        norm_type: p of the norm, or `"inf"`.
        enable_global_grad_clip, param_to_pgs: Accepted for TorchRec, not used: sharded parameters know their ranks.
        track_grad_norm: Updates `last_total_grad_norm` even if the norm is not clipped.
    """

    def __init__(
        self,
        optimizer: KeyedOptimizer,
        clipping: GradientClipping = GradientClipping.NONE,
        max_gradient: float = 0.1,
        norm_type: float | str = 2.0,
        enable_global_grad_clip: bool = False,
        param_to_pgs: Mapping[Any, Any] | None = None,
        track_grad_norm: bool = False,
    ) -> None:
        super().__init__(optimizer)
        self._clipping = clipping
        self._max_gradient = max_gradient
        self._norm_type = float(norm_type)
        self._tracks = track_grad_norm
        self._last_norm: torch.Tensor | None = None

    @property
    def last_total_grad_norm(self) -> torch.Tensor | None:
        """Norm of all gradients before clipping in the last step, if it was computed."""
        return self._last_norm

    def compute_total_grad_norm(self) -> torch.Tensor:
        """Norm of all gradients, over the shards of all ranks."""
        return _norm_over_ranks(list(self.params.values()), self._norm_type)

    def clip_grad_norm_(self) -> torch.Tensor:
        """Clips the norm of all gradients and returns the norm before clipping."""
        norm = self.compute_total_grad_norm()
        torch.nn.utils.clip_grads_with_norm_(self._with_gradients(), self._max_gradient, norm)
        return norm

    def _with_gradients(self) -> list[torch.Tensor]:
        return [param for param in self.params.values() if param.grad is not None]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if not any(param.is_meta for param in self.params.values()):
            self._clip()
        super().step(closure)

    def _clip(self) -> None:
        if self._tracks and self._clipping is not GradientClipping.NORM:
            self._last_norm = self.compute_total_grad_norm()
        match self._clipping:
            case GradientClipping.NORM:
                self._last_norm = self.clip_grad_norm_()
            case GradientClipping.VALUE:
                torch.nn.utils.clip_grad_value_(self._with_gradients(), self._max_gradient)
            case GradientClipping.NONE:
                pass


def _norm_over_ranks(params: Sequence[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Norm of all gradients, over the shards of all ranks, as the norm of the ranks' norms."""
    shards = [param for param in params if hasattr(param, GATHER)]
    dense_norm = torch.nn.utils.get_total_norm(
        _grads(param for param in params if not hasattr(param, GATHER)), norm_type
    )
    if not shards:
        return dense_norm
    own_norm = torch.nn.utils.get_total_norm(_grads(shards), norm_type).to(shards[0].device, torch.float32)
    shard_norms = getattr(shards[0], GATHER)(own_norm)
    return torch.linalg.vector_norm(torch.cat([dense_norm.to(shard_norms)[None], shard_norms]), norm_type)


def _grads(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [param.grad for param in params if param.grad is not None]
