"""`torchrec.optim`: optimizers by parameter name, schedules, clipping."""

from rayrec.optim import GradientClipping, GradientClippingOptimizer, in_backward_optimizer_filter
from rayrec.torchrec.not_offered import names_left_out
from rayrec.torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from rayrec.torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule
from rayrec.torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from rayrec.torchrec.optim.optimizers import SGD, Adagrad, Adam
from rayrec.torchrec.optim.rowwise import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB, RowWiseAdagrad
from rayrec.torchrec.optim.semi_sync import SemisyncOptimizer
from rayrec.torchrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__getattr__ = names_left_out(__name__)

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
    "SemisyncOptimizer",
    "WarmupOptimizer",
    "WarmupPolicy",
    "WarmupStage",
    "apply_optimizer_in_backward",
    "in_backward_optimizer_filter",
]
