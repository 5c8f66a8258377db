"""`torchrec.optim.warmup`."""

from rayrec.optim.warmup import WarmupOptimizer, WarmupPolicy, WarmupStage

__all__ = ["WarmupOptimizer", "WarmupPolicy", "WarmupStage"]
