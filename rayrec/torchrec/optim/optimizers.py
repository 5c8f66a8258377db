"""`torchrec.optim.optimizers`: the row-wise optimizers and the filter of parameters."""

from rayrec.optim import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    LarsSGD,
    PartialRowWiseAdam,
    PartialRowWiseLAMB,
    in_backward_optimizer_filter,
)

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
