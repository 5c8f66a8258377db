"""A thorough check of a KeyedJaggedTensor that names the feature, the example and the value at fault."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor


def validate(kjt: KeyedJaggedTensor, rows_of: Mapping[str, int] | None = None) -> None:
    """Checks that lengths, offsets, values and weights fit together and, where `rows_of` gives a feature's table rows,
    that its ids lie inside. Reads every value: for tests, debugging and data loading, not for every step on a GPU.

    Raises:
        ValueError: what does not fit, with feature, example and value.
    """
    keys, lengths = kjt.keys(), kjt.lengths()
    if lengths.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"lengths are {lengths.dtype}; int32 or int64 is needed")
    if kjt.values().dtype not in (torch.int32, torch.int64):
        raise ValueError(f"values are {kjt.values().dtype}; int32 or int64 is needed")
    starts = torch.tensor(kjt.stride_per_key()).cumsum(0)
    negative = (lengths < 0).nonzero()
    if negative.numel():
        at = int(negative[0])
        place = int(torch.searchsorted(starts, at, right=True))
        example = at - (int(starts[place - 1]) if place else 0)
        raise ValueError(f"feature {keys[place]!r}, example {example}: length {int(lengths[at])} is negative")
    total = int(lengths.sum())
    if total != kjt.values().numel():
        raise ValueError(f"lengths add up to {total}, but there are {kjt.values().numel()} values")
    for key in keys:
        if rows_of is not None and key in rows_of:
            _check_range(kjt, key, rows_of[key])


def _check_range(kjt: KeyedJaggedTensor, key: str, rows: int) -> None:
    feature = kjt[key]
    values = feature.values()
    outside = ((values < 0) | (values >= rows)).nonzero()
    if outside.numel():
        at = int(outside[0])
        example = int(torch.searchsorted(feature.offsets().to(torch.int64), at, right=True)) - 1
        raise ValueError(
            f"feature {key!r}, example {example}: id {int(values[at])} is outside its table's rows [0, {rows})"
        )
