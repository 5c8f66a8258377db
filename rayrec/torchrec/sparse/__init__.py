"""`torchrec.sparse`."""

from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = ["JaggedTensor", "KeyedJaggedTensor", "KeyedTensor"]
