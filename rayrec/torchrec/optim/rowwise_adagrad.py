"""`torchrec.optim.rowwise_adagrad`."""

from rayrec.optim import RowWiseAdagrad
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["RowWiseAdagrad"]
