"""Where TorchRec's users look for `RowWiseAdagrad`, which is written in `rowwise`."""

from rayrec.optim.rowwise import RowWiseAdagrad

__all__ = ["RowWiseAdagrad"]
