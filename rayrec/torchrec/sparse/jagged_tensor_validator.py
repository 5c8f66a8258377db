"""Thorough checks of a KeyedJaggedTensor that name the feature, the example and the value at fault."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from rayrec.sparse import KeyedJaggedTensor

logger = logging.getLogger(__name__)
INTEGERS = (torch.int32, torch.int64)


class TableConfig(Protocol):
    """What is read of a table's config."""

    num_embeddings: int
    feature_names: list[str]


def validate_keyed_jagged_tensor(kjt: KeyedJaggedTensor, configs: Sequence[TableConfig] | None = None) -> bool:
    """Checks a tensor, and its ids against the tables that read them.

    Args:
        configs: tables; features without one, and tables without a feature of this tensor, are passed over.

    Returns:
        False where an id lies outside a table; the log names feature, range and table size.

    Raises:
        ValueError: parts of the tensor that do not fit together (see `validate`).
    """
    validate(kjt)
    good = True
    for config in configs or ():
        for feature in config.feature_names:
            if feature not in kjt.index_per_key():
                continue
            ids = kjt[feature].values()
            if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < config.num_embeddings):
                logger.error(
                    "feature %r: ids from %d to %d, but its table has the rows [0, %d)",
                    feature,
                    int(ids.min()),
                    int(ids.max()),
                    config.num_embeddings,
                )
                good = False
    return good


def validate(kjt: KeyedJaggedTensor, rows_of: Mapping[str, int] | None = None) -> None:
    """Checks that lengths, offsets, values, weights and inverse indices fit together, that weights are finite and,
    where `rows_of` gives a feature's table rows, that its ids lie inside. Reads every value: for tests, debugging and
    data loading, not for every step on a GPU.

    Raises:
        ValueError: what does not fit, with feature, example and value.
    """
    _check_dtypes(kjt)
    twice = [key for key in kjt.keys() if kjt.keys().count(key) > 1]
    if twice:
        raise ValueError(f"key {twice[0]!r} comes twice in {kjt.keys()}")
    _check_lengths(kjt)
    _check_weights(kjt)
    _check_inverse(kjt)
    for key in kjt.keys():
        if rows_of is not None and key in rows_of:
            _check_range(kjt, key, rows_of[key])


def _check_dtypes(kjt: KeyedJaggedTensor) -> None:
    parts = {"lengths": kjt.lengths_or_none(), "offsets": kjt.offsets_or_none(), "values": kjt.values()}
    for name, tensor in parts.items():
        if tensor is not None and tensor.dtype not in INTEGERS:
            raise ValueError(f"{name} are {tensor.dtype}; int32 or int64 is needed")
    weights = kjt.weights_or_none()
    if weights is not None and not weights.is_floating_point():
        raise ValueError(f"weights are {weights.dtype}; a floating-point type is needed")


def _where(kjt: KeyedJaggedTensor, bag: int) -> str:
    """Feature and example of a bag, counted over all features."""
    for key, batch in zip(kjt.keys(), kjt.stride_per_key(), strict=True):
        if bag < batch:
            return f"feature {key!r}, example {bag}"
        bag -= batch
    raise AssertionError(bag)


def _bag_of(offsets: torch.Tensor, value: int) -> int:
    """The bag that a value lies in; empty bags hold none."""
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
        raise ValueError(f"offsets begin at {int(offsets[0])}; they must begin at 0")
    if offsets.shape[0] != lengths.shape[0] + 1:
        raise ValueError(f"{offsets.shape[0]} offsets do not fit {lengths.shape[0]} lengths; one more is needed")
    unlike = (offsets[1:] - offsets[:-1] != lengths).nonzero()
    if unlike.numel():
        bag = int(unlike[0])
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
        at = int(bad[0])
        bag = _bag_of(kjt.offsets(), at)
        raise ValueError(f"{_where(kjt, bag)}: weight {float(weights[at])} of id {int(kjt.values()[at])} is not finite")


def _check_inverse(kjt: KeyedJaggedTensor) -> None:
    inverse = kjt.inverse_indices_or_none()
    if inverse is None:
        return
    keys, indices_FB = inverse
    for key, batch in zip(kjt.keys(), kjt.stride_per_key(), strict=True):
        row = indices_FB[keys.index(key)]
        outside = ((row < 0) | (row >= batch)).nonzero()
        if outside.numel():
            at = int(outside[0])
            raise ValueError(
                f"feature {key!r}, example {at}: inverse index {int(row[at])} is outside the feature's own batch "
                f"[0, {batch})"
            )


def _check_range(kjt: KeyedJaggedTensor, key: str, rows: int) -> None:
    feature = kjt[key]
    values = feature.values()
    outside = ((values < 0) | (values >= rows)).nonzero()
    if outside.numel():
        at = int(outside[0])
        raise ValueError(
            f"feature {key!r}, example {_bag_of(feature.offsets(), at)}: id {int(values[at])} is outside its table's "
            f"rows [0, {rows})"
        )
