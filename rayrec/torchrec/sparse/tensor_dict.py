"""Converts a tensordict (an optional package) of sparse features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rayrec.sparse.jagged_tensor import JaggedTensor
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def maybe_td_to_kjt(features: Any, keys: Sequence[str] | None = None) -> KeyedJaggedTensor:
    """Converts a tensordict of nested jagged tensors to a KeyedJaggedTensor; returns a KeyedJaggedTensor unchanged.

    Args:
        features: `KeyedJaggedTensor`, or a mapping of names to `torch.nested` tensors of layout jagged, [B, any].
        keys: the features to convert, in this order; default: all.
    """
    if isinstance(features, KeyedJaggedTensor):
        return features
    names = list(features.keys()) if keys is None else list(keys)
    return KeyedJaggedTensor.from_jt_dict(
        {name: JaggedTensor(features[name].values(), offsets=features[name].offsets()) for name in names}
    )
