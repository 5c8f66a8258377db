"""Several jagged tensors as one: the arguments of the joined KeyedJaggedTensor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from rayrec.sparse.jagged import JaggedTensor
from rayrec.sparse.keyed_jagged import KeyedJagged


def from_jt_dict(jt_dict: Mapping[str, JaggedTensor]) -> dict[str, Any]:
    """One key for each entry; unequal batch sizes make a batch size that varies by key."""
    jts = list(jt_dict.values())
    strides = [jt.lengths().shape[0] for jt in jts]
    return {
        "keys": list(jt_dict),
        "values": cat([jt.values() for jt in jts]),
        "weights": _cat_weights([(key, jt.weights_or_none()) for key, jt in jt_dict.items()]),
        "lengths": cat([jt.lengths() for jt in jts]),
        "stride_per_key_per_rank": [[s] for s in strides] if len(set(strides)) > 1 else None,
    }


def concat(kjt_list: Sequence[KeyedJagged]) -> dict[str, Any]:
    """All keys of all tensors, in order."""
    if not kjt_list:
        raise ValueError("concat: there is nothing to join")
    varying = any(kjt.variable_stride_per_key() for kjt in kjt_list)
    joined = _join_inverse(kjt_list)
    if (not varying or joined is not None) and len({kjt.stride() for kjt in kjt_list}) > 1:
        raise ValueError(f"concat: strides differ: {[kjt.stride() for kjt in kjt_list]}")
    return {
        "keys": [key for kjt in kjt_list for key in kjt.keys()],
        "values": cat([kjt.values() for kjt in kjt_list]),
        "weights": _cat_weights([(", ".join(kjt.keys()), kjt.weights_or_none()) for kjt in kjt_list]),
        "lengths": cat([kjt.lengths() for kjt in kjt_list]),
        "stride": None if varying else kjt_list[0].stride(),
        "stride_per_key_per_rank": [strides for kjt in kjt_list for strides in _strides(kjt)] if varying else None,
        "inverse_indices": None if joined is None else (joined[0], torch.cat(joined[1])),
    }


def _strides(kjt: KeyedJagged) -> list[list[int]]:
    return kjt.stride_per_key_per_rank() or [[kjt.stride()] for _ in kjt.keys()]


def cat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _cat_weights(weights: Sequence[tuple[str, torch.Tensor | None]]) -> torch.Tensor | None:
    """All weights joined; the names are for an error."""
    present = [w for _, w in weights if w is not None]
    if not present:
        return None
    if len(present) != len(weights):
        without = [name for name, w in weights if w is None]
        raise ValueError(f"weighted and unweighted features cannot be joined; without weights: {without}")
    return cat(present)


def _join_inverse(kjt_list: Sequence[KeyedJagged]) -> tuple[list[str], list[torch.Tensor]] | None:
    parts = [part for kjt in kjt_list if (part := kjt.inverse_indices_or_none()) is not None]
    if len(parts) < len(kjt_list):
        return None
    return [key for keys, _ in parts for key in keys], [indices for _, indices in parts]
