"""Optimizers by parameter name. The fused kernels' own updates live in `distributed.kernel`."""

from rayrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from rayrec.optim.optimizers import in_backward_optimizer_filter

__all__ = ["CombinedOptimizer", "KeyedOptimizer", "KeyedOptimizerWrapper", "in_backward_optimizer_filter"]
