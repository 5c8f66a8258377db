"""Optimizers by parameter name, schedules, clipping. The fused kernels' own updates live in `distributed.kernel`."""

from rayrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from rayrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from rayrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from rayrec.optim.optimizers import in_backward_optimizer_filter
from rayrec.optim.rowwise import LAMB, LarsSGD, PartialRowWiseAdam, RowWiseAdagrad
from rayrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
    "LAMB",
    "CombinedOptimizer",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "LarsSGD",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "RowWiseAdagrad",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
    "in_backward_optimizer_filter",
]
