"""`torchrec.optim.fused`."""

from rayrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer, FusedOptimizerModule

__all__ = ["EmptyFusedOptimizer", "FusedOptimizer", "FusedOptimizerModule"]
