"""`torchrec.optim.optimizers`: row-wise optimizers, and torch's SGD, Adagrad and Adam."""

from torch.optim import SGD, Adagrad, Adam

from rayrec.optim import in_backward_optimizer_filter
from rayrec.torchrec.optim.rowwise import LAMB, LarsSGD, PartialRowWiseAdam, PartialRowWiseLAMB

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "LarsSGD",
    "PartialRowWiseAdam",
    "PartialRowWiseLAMB",
    "in_backward_optimizer_filter",
]
