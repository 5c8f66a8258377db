"""`torchrec.sparse`."""

from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.torchrec.not_offered import names_left_out
from rayrec.torchrec.sparse import methods  # noqa: F401 - gives the types TorchRec's methods

__getattr__ = names_left_out(__name__)

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
