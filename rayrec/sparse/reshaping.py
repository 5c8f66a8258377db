"""A KeyedJaggedTensor's keys cut apart and reordered, its examples repeated: the arguments of the new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from rayrec.sparse import ops
from rayrec.sparse.joining import cat
from rayrec.sparse.keyed_jagged import KeyedJagged


def split(kjt: KeyedJagged, segments: Sequence[int]) -> list[dict[str, Any] | None]:
    """Consecutive groups of keys; None for a group of all keys."""
    num = len(kjt.keys())
    if sum(segments) != num:
        raise ValueError(f"split: segments {list(segments)} do not add up to {num} keys")
    edges = [0, *accumulate(segments)]
    return [None if num and (a, b) == (0, num) else _slice(kjt, a, b) for a, b in pairwise(edges)]


def _slice(kjt: KeyedJagged, first: int, last: int) -> dict[str, Any]:
    start, stop = kjt.offset_per_key()[first], kjt.offset_per_key()[last]
    rows = kjt.lengths_offset_per_key()
    weights = kjt.weights_or_none()
    return {
        "keys": kjt.keys()[first:last],
        "values": kjt.values()[start:stop],
        "weights": None if weights is None else weights[start:stop],
        "lengths": kjt.lengths()[rows[first] : rows[last]],
        "stride": kjt.stride(),
        "stride_per_key_per_rank": kjt.stride_per_key_per_rank()[first:last] if kjt.variable_stride_per_key() else None,
        "inverse_indices": _inverse_of(kjt, range(first, last)),
    }


def permute(kjt: KeyedJagged, indices: Sequence[int], indices_tensor: torch.Tensor | None = None) -> dict[str, Any]:
    """The keys at `indices`, in that order; repeats keep their name."""
    keys = [kjt.keys()[i] for i in indices]
    if kjt.variable_stride_per_key():
        return _permute_varying(kjt, indices, keys)
    order = indices_tensor
    if order is None:
        order = torch.tensor(list(indices), dtype=torch.int32, device=kjt.device())
    known = kjt.length_per_key_or_none()
    lengths, values, weights = ops.permute_segments(
        order.to(torch.int32),
        kjt.lengths().view(len(kjt.keys()), kjt.stride()),
        kjt.values(),
        kjt.weights_or_none(),
        sum(known[i] for i in indices) if known is not None else None,
    )
    return {"keys": keys, "values": values, "weights": weights, "lengths": lengths.view(-1), "stride": kjt.stride()}


def _permute_varying(kjt: KeyedJagged, indices: Sequence[int], keys: list[str]) -> dict[str, Any]:
    parts = [kjt.feature(i) for i in indices]
    weights = kjt.weights_or_none()
    strides = kjt.stride_per_key_per_rank()
    return {
        "keys": keys,
        "values": cat([p.values() for p in parts]) if parts else kjt.values()[:0],
        "weights": None if weights is None else cat([p.weights() for p in parts]) if parts else weights[:0],
        "lengths": cat([p.lengths() for p in parts]) if parts else kjt.lengths()[:0],
        "stride": kjt.stride(),
        "stride_per_key_per_rank": [strides[i] for i in indices],
        "inverse_indices": _inverse_of(kjt, indices),
    }


def _inverse_of(kjt: KeyedJagged, places: Sequence[int]) -> tuple[list[str], torch.Tensor] | None:
    """The inverse indices of the keys at `places`."""
    inverse = kjt.inverse_indices_or_none()
    if inverse is None:
        return None
    keys, indices_FB = inverse
    names = [kjt.keys()[place] for place in places]
    return names, indices_FB[[keys.index(name) for name in names]]


def expand(kjt: KeyedJagged) -> dict[str, Any]:
    """The lists of all B examples of a tensor whose batch size varies, repeated as its inverse indices say."""
    keys, indices_FB = kjt.inverse_indices()
    order = [keys.index(key) for key in kjt.keys()]
    starts = torch.tensor(kjt.lengths_offset_per_key()[:-1], device=kjt.device())
    rows = (indices_FB[order] + starts[:, None]).view(-1).to(torch.int32)
    lengths, values, weights = ops.permute_segments(rows, kjt.lengths()[:, None], kjt.values(), kjt.weights_or_none())
    return {
        "keys": kjt.keys(),
        "values": values,
        "weights": weights,
        "lengths": lengths.view(-1),
        "stride": kjt.stride(),
    }
