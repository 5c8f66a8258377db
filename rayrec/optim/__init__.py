"""Optimizers by parameter name, and clipping. Updates inside backward are in `distributed.kernel`."""

from rayrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from rayrec.optim.in_backward import apply_optimizer_in_backward, in_backward_optimizer_filter
from rayrec.optim.keyed import (
    CombinedOptimizer,
    KeyedOptimizer,
    KeyedOptimizerWrapper,
    OptimizerWrapper,
)

__all__ = [
    "CombinedOptimizer",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "OptimizerWrapper",
    "apply_optimizer_in_backward",
    "in_backward_optimizer_filter",
]
