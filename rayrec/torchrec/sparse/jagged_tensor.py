"""`torchrec.sparse.jagged_tensor`: the sparse types, and conversions and comparisons of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from rayrec.sparse import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

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

# Tensors of a flattened KeyedJaggedTensor: values, weights, lengths, offsets, batch sizes, inverse indices.
FLAT_LENGTH = 6


class ComputeKJTToJTDict(nn.Module):
    """Splits a KeyedJaggedTensor by key."""

    def forward(self, keyed_jagged_tensor: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        return keyed_jagged_tensor.to_dict()


class ComputeJTDictToKJT(nn.Module):
    """Joins a dict of JaggedTensors."""

    def forward(self, jt_dict: Mapping[str, JaggedTensor]) -> KeyedJaggedTensor:
        return KeyedJaggedTensor.from_jt_dict(jt_dict)


def _equal(first: torch.Tensor | None, second: torch.Tensor | None) -> bool:
    if first is None or second is None:
        return first is second
    return first.shape == second.shape and torch.allclose(first, second)


def jt_is_equal(first: object, second: object) -> bool:
    """Whether both are JaggedTensors with equal lists and weights, stored as lengths or as offsets."""
    if not (isinstance(first, JaggedTensor) and isinstance(second, JaggedTensor)):
        return False
    return (
        _equal(first.weights_or_none(), second.weights_or_none())
        and _equal(first.values(), second.values())
        and _equal(first.lengths(), second.lengths())
    )


def kjt_is_equal(first: object, second: object) -> bool:
    """Whether both are KeyedJaggedTensors with equal keys in the same order, batch sizes, lists and weights."""
    if not (isinstance(first, KeyedJaggedTensor) and isinstance(second, KeyedJaggedTensor)):
        return False
    return (
        first.keys() == second.keys()
        and first.stride_per_key() == second.stride_per_key()
        and _equal(first.weights_or_none(), second.weights_or_none())
        and _equal(first.values(), second.values())
        and _equal(first.lengths(), second.lengths())
    )


def permute_multi_embedding(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[torch.Tensor]:
    """Alias of `KeyedTensor.regroup`."""
    return KeyedTensor.regroup(keyed_tensors, groups)


def regroup_kts(keyed_tensors: list[KeyedTensor], groups: list[list[str]]) -> list[torch.Tensor]:
    """Alias of `KeyedTensor.regroup`."""
    return KeyedTensor.regroup(keyed_tensors, groups)


def flatten_kjt_list(kjt_arr: Sequence[KeyedJaggedTensor]) -> tuple[list[torch.Tensor | None], list[list[str]]]:
    """Returns a flat list of six tensors (or None) per KeyedJaggedTensor, and the keys of each."""
    tensors: list[torch.Tensor | None] = []
    for kjt in kjt_arr:
        inverse = kjt.inverse_indices_or_none()
        varying = torch.tensor(kjt.stride_per_key_per_rank(), dtype=torch.int32)
        tensors += [kjt.values(), kjt.weights_or_none(), kjt.lengths_or_none(), kjt.offsets_or_none()]
        tensors += [varying if kjt.variable_stride_per_key() else None, inverse[1] if inverse else None]
    return tensors, [kjt.keys() for kjt in kjt_arr]


def unflatten_kjt_list(
    values: Sequence[torch.Tensor | None], contexts: Sequence[Sequence[str]]
) -> list[KeyedJaggedTensor]:
    """Inverts `flatten_kjt_list`."""
    out = []
    for index, keys in enumerate(contexts):
        ids, weights, lengths, offsets, strides, inverse = values[index * FLAT_LENGTH : (index + 1) * FLAT_LENGTH]
        assert ids is not None
        indices = None if inverse is None else (list(keys), inverse)
        out.append(
            KeyedJaggedTensor(
                keys, ids, weights, lengths, offsets, stride_per_key_per_rank=strides, inverse_indices=indices
            )
        )
    return out
