"""Optimizers by parameter name, clipping. The fused kernels' own updates live in `distributed.kernel`.

SGD, Adagrad and Adam are torch's, here because scripts name a table's optimizer by them.
"""

from torch.optim import SGD, Adagrad, Adam

from rayrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from rayrec.optim.clipping import GradientClipping, GradientClippingOptimizer
from rayrec.optim.fused import FusedOptimizer
from rayrec.optim.in_backward import in_backward_optimizer_filter
from rayrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from rayrec.optim.rowwise import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB, RowWiseAdagrad

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "CombinedOptimizer",
    "FusedOptimizer",
    "GradientClipping",
    "GradientClippingOptimizer",
    "KeyedOptimizer",
    "KeyedOptimizerWrapper",
    "LarsSGD",
    "OptimizerWrapper",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "RowWiseAdagrad",
    "apply_optimizer_in_backward",
    "in_backward_optimizer_filter",
]
