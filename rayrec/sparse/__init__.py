"""Sparse types: jagged lists of ids and named dense blocks. Tables and exchanges live elsewhere."""

from rayrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
