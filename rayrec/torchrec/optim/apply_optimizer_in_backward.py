"""`torchrec.optim.apply_optimizer_in_backward`."""

from rayrec.optim.in_backward import apply_optimizer_in_backward

__all__ = ["apply_optimizer_in_backward"]
