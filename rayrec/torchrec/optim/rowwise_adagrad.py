"""`torchrec.optim.rowwise_adagrad`."""

from rayrec.torchrec.not_offered import names_left_out
from rayrec.torchrec.optim.rowwise import RowWiseAdagrad

__getattr__ = names_left_out(__name__)

__all__ = ["RowWiseAdagrad"]
