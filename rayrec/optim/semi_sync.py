"""A name of TorchRec's that is not offered; asking for it says what to do instead."""

from rayrec.not_offered import without

__getattr__ = without(
    __name__, {"SemisyncOptimizer": "tables and dense parameters are in step on every rank, at every step"}
)
