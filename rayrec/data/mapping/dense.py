"""Maps the columns of dense features to one float32 matrix, and applies their transforms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.arrays.arrow_types import plain_numbers
from rayrec.data.arrays.buffers import F32, Floats, empty
from rayrec.data.arrays.lists import unnest
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.schema import DenseFeature
from rayrec.data.mapping.transforms import Clip, Log1p, MinMax, Quantile, Standardize, Transform

_BLOCK_ROWS = 8192
_FLOAT64 = pa.float64().id


def map_dense(
    features: Sequence[DenseFeature], columns: Mapping[str, pa.Array], num_rows: int, problems: Problems
) -> F32:
    """Maps the dense features to float32 [n, N]. Adds bad rows to `problems`."""
    with np.errstate(all="ignore"):  # overflows and invalid logarithms are reported below, by row
        transformed_numbers = [transformed(_numbers(columns[f.column], f, problems), f.transforms) for f in features]
        matrices = [
            numbers.reshape(num_rows, f.width) for numbers, f in zip(transformed_numbers, features, strict=True)
        ]
        out = _concatenate(matrices, num_rows)
    if not np.isfinite(out).all():
        _report(features, columns, out, problems)
    return out


def _concatenate(matrices: Sequence[Floats], num_rows: int) -> F32:
    """Concatenates the columns of the matrices, in blocks of rows that fit the CPU cache."""
    width = sum(matrix.shape[1] for matrix in matrices)
    out = empty(num_rows * width, np.float32).reshape(num_rows, width)
    for start in range(0, num_rows, _BLOCK_ROWS):
        block, column = out[start : start + _BLOCK_ROWS], 0
        for matrix in matrices:
            block[:, column : column + matrix.shape[1]] = matrix[start : start + _BLOCK_ROWS]
            column += matrix.shape[1]
    return out


def _numbers(array: pa.Array, feature: DenseFeature, problems: Problems) -> Floats:
    if feature.width > 1:
        array = _leaf(array, feature, problems)
    if array.type.id != _FLOAT64:  # the usual type of a request, in a third of the time
        array = plain_numbers(array)
    if array.null_count:
        if feature.default is None:
            null_rows = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) // feature.width
            fix = f"fill the nulls, or set `default: <number>` for feature {feature.name!r}"
            problems.add(null_rows, feature.column, f"dense feature {feature.name!r} is null", fix)
        array = pc.cast(array, pa.float64(), safe=False).fill_null(feature.default or 0.0)
    values = array.to_numpy(zero_copy_only=False)
    if not feature.transforms and values.dtype == np.float32:
        return values  # exact in float64 too
    # Transforms compute in float64 whatever the column's type, so that a number depends neither on a null next to it
    # nor on whether it came from a file or a request. Large integers (timestamps, counts) lose digits as float32.
    return values.astype(np.float64, copy=False)


def _leaf(array: pa.Array, feature: DenseFeature, problems: Problems) -> pa.Array:
    """The numbers of a list column, `width` per row. Reports rows of another length and reads them as zeros."""
    lists = unnest(array)
    lengths = np.diff(lists.offsets)
    bad = np.flatnonzero(lengths != feature.width)
    if not len(bad):
        return lists.leaf
    filled = feature.default is not None and lists.nulls is not None
    wrong = bad[~lists.nulls[bad]] if filled and lists.nulls is not None else bad
    problem = f"dense feature {feature.name!r} must be a list of {feature.width} numbers"
    fix = "write lists of equal length, or correct the feature's width"
    problems.add(wrong, feature.column, problem, fix, lambda k: f"a list of {lengths[wrong[k]]}")
    complete = lengths == feature.width
    index = np.full((len(lengths), feature.width), -1, dtype=np.int64)
    index[complete] = np.flatnonzero(np.repeat(complete, lengths)).reshape(-1, feature.width)
    flat = index.reshape(-1)
    # Missing lists become nulls, which the default replaces; rows of wrong length get any valid number.
    leaf = pc.cast(plain_numbers(lists.leaf.take(pa.array(flat, mask=flat < 0))), pa.float64(), safe=False)
    refused = np.zeros(len(lengths), dtype=np.bool_)
    refused[wrong] = True
    return pc.if_else(pa.array(np.repeat(refused, feature.width)), 0.0, leaf)


def transformed(values: Floats, transforms: Sequence[Transform]) -> Floats:
    """Applies the transforms in order; NaN where a transform is undefined."""
    for transform in transforms:
        match transform:
            case Log1p():
                values = _log1p(values)
            case Clip():
                values = np.clip(values, transform.lowest, transform.highest)
            case Standardize(mean=float() as mean, std=float() as std):
                values = (values - mean) / std
            case MinMax(lowest=float() as low, highest=float() as high):
                values = np.clip((values - low) / (high - low), 0.0, 1.0)
            case Quantile(boundaries=list() as edges):
                values = np.interp(values, edges, np.linspace(0.0, 1.0, len(edges)))
            case _:  # `column_types.py` refuses transforms that are not fitted
                raise AssertionError(transform)
    return values


def _log1p(values: Floats) -> Floats:
    logs = np.log1p(values)  # NaN below -1
    if not (values > -1).all():
        logs[np.isneginf(logs)] = np.nan  # a later clip would hide -inf
    return logs


def _report(features: Sequence[DenseFeature], columns: Mapping[str, pa.Array], out: F32, problems: Problems) -> None:
    column = 0
    for feature in features:
        values = out[:, column : column + feature.width]
        column += feature.width
        bad = np.flatnonzero(~np.isfinite(values).all(axis=1))
        _report_one(feature, columns[feature.column], values[bad], bad, problems)


def _report_one(
    feature: DenseFeature, array: pa.Array, values: F32, bad: npt.NDArray[np.int64], problems: Problems
) -> None:
    steps = " and ".join(transform.kind for transform in feature.transforms)

    def value(k: int) -> str:
        raw = str(array[int(bad[k])].as_py())
        transformed_value = str(values[k, 0] if feature.width == 1 else values[k].tolist())
        return raw if transformed_value == raw else f"{raw}, {transformed_value} after {steps or 'the cast to float32'}"

    fix = "clean the column; set a `default` for nulls, or limit the range by a `clip` transform"
    if any(isinstance(transform, Log1p) for transform in feature.transforms):
        fix += "; log1p needs numbers above -1: put {kind: clip, lowest: 0.0} before it"
    problems.add(bad, feature.column, f"dense feature {feature.name!r} is not a finite float32", fix, value)
