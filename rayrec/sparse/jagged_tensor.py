"""The sparse types and their conversions under one roof, where users of other libraries of this kind look for them.

Each is written in a file of its own; here is the home that they print, pickle and are imported by.
"""

from rayrec.sparse.conversions import (
    ComputeJTDictToKJT,
    ComputeKJTToJTDict,
    flatten_kjt_list,
    jt_is_equal,
    kjt_is_equal,
    permute_multi_embedding,
    regroup_kts,
    unflatten_kjt_list,
)
from rayrec.sparse.jagged import JaggedTensor
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from rayrec.sparse.keyed_tensor import KeyedTensor

__all__ = [
    "ComputeJTDictToKJT",
    "ComputeKJTToJTDict",
    "JaggedTensor",
    "KeyedJaggedTensor",
    "KeyedTensor",
    "flatten_kjt_list",
    "jt_is_equal",
    "kjt_is_equal",
    "permute_multi_embedding",
    "regroup_kts",
    "unflatten_kjt_list",
]

for _type in (JaggedTensor, KeyedJaggedTensor, KeyedTensor):
    _type.__module__ = __name__
