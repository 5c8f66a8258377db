"""Sparse types: jagged lists of ids and named dense blocks. Tables and exchanges live elsewhere."""

from rayrec.sparse.jagged_tensor import JaggedTensor
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from rayrec.sparse.keyed_tensor import KeyedTensor
from rayrec.sparse.validate import validate

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor", "validate"]
