"""Jagged and keyed tensors: lists of ids by feature, and dense vectors by name.

| file | type |
|---|---|
| `jagged_tensor.py` | `JaggedTensor`: the lists of one sparse feature |
| `keyed_jagged_tensor.py` | `KeyedJaggedTensor`: the lists of all sparse features of a batch |
| `keyed_tensor.py` | `KeyedTensor`: named blocks of a dense tensor |
| `ops.py` | fbgemm's jagged-tensor operators |
"""

from rayrec.sparse import jagged_tensor
from rayrec.sparse.jagged_tensor import JaggedTensor
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor
from rayrec.sparse.keyed_tensor import KeyedTensor

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]

# The types print and pickle under one module, as TorchRec's do.
for _type in (KeyedJaggedTensor, KeyedTensor):
    _type.__module__ = jagged_tensor.__name__
    setattr(jagged_tensor, _type.__name__, _type)
