"""Jagged tensors: lists of different lengths in one flat tensor."""

import torch

from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.torchrec.sparse.jagged_tensor_validator import validate

# Two features of three examples: user has one id each, tags 2, 0 and 1.
batch = KeyedJaggedTensor(["user", "tags"], torch.tensor([7, 8, 9, 1, 2, 3]), lengths=torch.tensor([1, 1, 1, 2, 0, 1]))
validate(batch, rows_of={"user": 10, "tags": 4})  # ids are inside their tables
tags: JaggedTensor = batch["tags"]
assert tags.to_padded_dense(2).tolist() == [[1, 2], [0, 0], [3, 0]]
assert batch.permute([1, 0]).keys() == ["tags", "user"]

pooled = KeyedTensor(["user", "tags"], [1, 2], torch.arange(9.0).view(3, 3))
assert pooled["tags"].shape == (3, 2)
(joined,) = KeyedTensor.regroup([pooled], [["tags", "user"]])
assert joined.shape == (3, 3)
