"""Optimizers by parameter name, schedules, clipping. The fused kernels' own updates live in `distributed.kernel`.

SGD, Adagrad and Adam are torch's, here because scripts name a table's optimizer by them.
"""

from torch.optim import SGD, Adagrad, Adam

from rayrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from rayrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from rayrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from rayrec.optim.in_backward import in_backward_optimizer_filter
from rayrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from rayrec.optim.rowwise import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB, RowWiseAdagrad
from rayrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "CombinedOptimizer",
    "EmptyFusedOptimizer",
    "FusedOptimizer",
    "FusedOptimizerModule",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "LarsSGD",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RowWiseAdagrad",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
    "in_backward_optimizer_filter",
]
