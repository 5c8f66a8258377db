"""The home of the sparse types: they print, pickle and are imported by it. Each is written in a file of its own."""

from rayrec.sparse.jagged import JaggedTensor
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from rayrec.sparse.keyed_tensor import KeyedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]

for _type in (JaggedTensor, KeyedJaggedTensor, KeyedTensor):
    _type.__module__ = __name__
