"""`torchrec.optim.optimizers`: the row-wise optimizers and the filter of parameters.

SGD, Adagrad and Adam are torch's, here because scripts name a table's optimizer by them.
"""

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
