"""`torchrec.optim.clipping`."""

from rayrec.optim.clipping import GradientClipping, GradientClippingOptimizer

__all__ = ["GradientClipping", "GradientClippingOptimizer"]
