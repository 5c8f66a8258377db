"""Checks of all values of a KeyedJaggedTensor; errors name the feature, the example and the value."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from rayrec.sparse import KeyedJaggedTensor

logger = logging.getLogger(__name__)
INTEGERS = (torch.int32, torch.int64)


class TableConfig(Protocol):
    """The fields of a table config that the check reads."""

    num_embeddings: int
    feature_names: list[str]


def validate_keyed_jagged_tensor(kjt: KeyedJaggedTensor, configs: Sequence[TableConfig] | None = None) -> bool:
    """Checks a tensor, and its ids against the sizes of the tables.

    Args:
        kjt: the tensor.
        configs: the tables; features without a table are not checked.

    Returns:
        False if an id is outside its table; logs the feature, the id range and the table size.

    Raises:
        ValueError: the tensor is inconsistent (see `validate`).
    """
    validate(kjt)
    is_valid = True
    for config in configs or ():
        for feature in config.feature_names:
            if feature not in kjt.index_per_key():
                continue
            ids = kjt[feature].values()
            if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < config.num_embeddings):
                logger.error(
                    "feature %r: ids from %d to %d, but its table has rows [0, %d)",
                    feature,
                    int(ids.min()),
                    int(ids.max()),
                    config.num_embeddings,
                )
                is_valid = False
    return is_valid


def validate(kjt: KeyedJaggedTensor, rows_of: Mapping[str, int] | None = None) -> None:
    """Checks that lengths, offsets, values, weights and inverse indices are consistent and weights are finite.

    It reads every value, so use it in tests, debugging and data loading, not in every step on a GPU.

    Args:
        kjt: the tensor.
        rows_of: number of table rows by feature; the ids of these features are checked too.

    Raises:
        ValueError: the first problem, with feature, example and value.
    """
    _check_dtypes(kjt)
    duplicates = [key for key in kjt.keys() if kjt.keys().count(key) > 1]
    if duplicates:
        raise ValueError(f"key {duplicates[0]!r} occurs twice in {kjt.keys()}")
    _check_lengths(kjt)
    _check_weights(kjt)
    _check_inverse(kjt)
    for key in kjt.keys():
        if rows_of is not None and key in rows_of:
            _check_range(kjt, key, rows_of[key])


def _check_dtypes(kjt: KeyedJaggedTensor) -> None:
    tensors = {"lengths": kjt.lengths_or_none(), "offsets": kjt.offsets_or_none(), "values": kjt.values()}
    for name, tensor in tensors.items():
        if tensor is not None and tensor.dtype not in INTEGERS:
            raise ValueError(f"{name} are {tensor.dtype}; int32 or int64 is needed")
    weights = kjt.weights_or_none()
    if weights is not None and not weights.is_floating_point():
        raise ValueError(f"weights are {weights.dtype}; a floating-point type is needed")


def _where(kjt: KeyedJaggedTensor, bag: int) -> str:
    """Returns the feature and example of a bag, given by its index over all features."""
    for key, batch in zip(kjt.keys(), kjt.stride_per_key(), strict=True):
        if bag < batch:
            return f"feature {key!r}, example {bag}"
        bag -= batch
    raise AssertionError(bag)


def _bag_of(offsets: torch.Tensor, value: int) -> int:
    """Returns the bag of a value."""
    return int(torch.searchsorted(offsets.to(torch.int64), value, right=True)) - 1


def _check_lengths(kjt: KeyedJaggedTensor) -> None:
    lengths, offsets = kjt.lengths(), kjt.offsets_or_none()
    negative = (lengths < 0).nonzero()
    if negative.numel():
        bag = int(negative[0])
        raise ValueError(f"{_where(kjt, bag)}: length {int(lengths[bag])} is negative")
    total = int(lengths.sum())
    if total != kjt.values().shape[0]:
        raise ValueError(f"lengths add up to {total}, but there are {kjt.values().shape[0]} values")
    if offsets is None:
        return
    if int(offsets[0]) != 0:
        raise ValueError(f"offsets start at {int(offsets[0])}; they must start at 0")
    if offsets.shape[0] != lengths.shape[0] + 1:
        raise ValueError(
            f"{offsets.shape[0]} offsets for {lengths.shape[0]} lengths; there must be one more offset than lengths"
        )
    mismatch = (offsets[1:] - offsets[:-1] != lengths).nonzero()
    if mismatch.numel():
        bag = int(mismatch[0])
        raise ValueError(
            f"{_where(kjt, bag)}: length {int(lengths[bag])}, but offsets go from {int(offsets[bag])} to "
            f"{int(offsets[bag + 1])}"
        )


def _check_weights(kjt: KeyedJaggedTensor) -> None:
    weights = kjt.weights_or_none()
    if weights is None:
        return
    bad = (~torch.isfinite(weights)).nonzero()
    if bad.numel():
        index = int(bad[0])
        location = _where(kjt, _bag_of(kjt.offsets(), index))
        raise ValueError(f"{location}: weight {float(weights[index])} of id {int(kjt.values()[index])} is not finite")


def _check_inverse(kjt: KeyedJaggedTensor) -> None:
    inverse = kjt.inverse_indices_or_none()
    if inverse is None:
        return
    keys, indices_FB = inverse
    for key, batch in zip(kjt.keys(), kjt.stride_per_key(), strict=True):
        row = indices_FB[keys.index(key)]
        outside = ((row < 0) | (row >= batch)).nonzero()
        if outside.numel():
            example = int(outside[0])
            raise ValueError(
                f"feature {key!r}, example {example}: inverse index {int(row[example])} is outside the feature's batch "
                f"[0, {batch})"
            )


def _check_range(kjt: KeyedJaggedTensor, key: str, rows: int) -> None:
    feature = kjt[key]
    values = feature.values()
    outside = ((values < 0) | (values >= rows)).nonzero()
    if outside.numel():
        index = int(outside[0])
        raise ValueError(
            f"feature {key!r}, example {_bag_of(feature.offsets(), index)}: id {int(values[index])} is outside the "
            f"rows [0, {rows}) of its table"
        )
