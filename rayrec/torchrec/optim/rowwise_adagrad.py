"""`torchrec.optim.rowwise_adagrad`."""

from rayrec.optim import RowWiseAdagrad

__all__ = ["RowWiseAdagrad"]
