"""Fits the missing statistics of a schema (boundaries, means, ranges) to the training data.

They become part of the schema, and so of the config, the run, the export and the fingerprint. A sample of up to
`SAMPLE_ROWS` rows, from windows spread over the data, is held in memory; for smaller data sets the result is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.data.arrays.arrow_types import floats_of, is_list
from rayrec.data.arrays.buffers import Floats
from rayrec.data.arrays.lists import unnest
from rayrec.data.arrays.widening import concatenated
from rayrec.data.mapping.column_types import check_types
from rayrec.data.mapping.dense import transformed
from rayrec.data.mapping.derived.derive import derive
from rayrec.data.mapping.derived.specs import Buckets, Derived
from rayrec.data.mapping.map_rows import source_columns
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.schema import DenseFeature, Schema
from rayrec.data.mapping.transforms import Fitted, MinMax, Quantile, Standardize, Transform
from rayrec.data.order.mix import Mix
from rayrec.data.source.manifest import Manifest
from rayrec.data.stream.reading import read_window
from rayrec.data.tools.quantiles import bucket_edges, quantiles
from rayrec.storage.errors import DataError

SAMPLE_ROWS = 1_000_000
# Significant digits of fitted numbers; float32 has 7.
_DIGITS = 9


def unfitted_names(schema: Schema) -> list[str]:
    """Names of the derived columns and features without statistics."""
    derived = [spec.name for spec in schema.derived if isinstance(spec, Buckets) and spec.edges is None]
    steps = [(feature.name, step) for feature in schema.dense for step in feature.transforms]
    return derived + [name for name, step in steps if isinstance(step, Fitted) and not step.fitted]


def without_statistics(schema: Schema) -> Schema:
    """The schema without fitted statistics."""
    return _changed(schema, None, lambda steps: [_unfitted(step) for step in steps])


def fit(data: Manifest | Mix, schema: Schema, sample_rows: int = SAMPLE_ROWS) -> Schema:
    """The schema with all missing statistics fitted.

    Args:
        data: the training data, with its filters; create its manifest with `for_reading(schema)`.

    Raises:
        DataError: a column without numbers, or with a single value.
    """
    table = _sample(data, schema.feature_columns, sample_rows)
    columns = source_columns(table, schema, table.column_names)
    derived: list[Derived] = []
    needed = {spec.name for spec in schema.derived_needed}
    for spec in schema.derived:
        if isinstance(spec, Buckets) and spec.edges is None and spec.quantiles is not None and spec.name in needed:
            numbers = _finite(columns[spec.column], spec.name)
            spec = spec.model_copy(update={"boundaries": bucket_edges(numbers, spec.quantiles)})
        if spec.name in needed:
            columns = derive([spec], columns, Problems())
        derived.append(spec)
    dense = [_fitted(feature, columns[feature.column]) for feature in schema.dense]
    done = schema.model_copy(update={"derived": derived, "dense": dense})
    check_types(done, table.schema, "the sample", labelled=False)
    return done


def statistics(schema: Schema) -> dict[str, Any]:
    """The sections of `schema` with statistics, as plain values."""
    plain = schema.model_dump(mode="json", exclude_unset=True, include={"dense", "derived"})
    for feature, values in zip(schema.dense, plain.get("dense", []), strict=True):
        steps = [step.model_dump(mode="json", exclude_none=True) for step in feature.transforms]
        values |= {"transforms": steps} if steps else {}
    return {name: section for name, section in plain.items() if section}


def for_reading(schema: Schema) -> Schema:
    """A schema with the same columns, for a manifest before the statistics are fitted."""
    return _changed(schema, [0.0], lambda steps: [step for step in steps if not isinstance(step, Fitted)])


def _changed(
    schema: Schema, boundaries: list[float] | None, steps: Callable[[list[Transform]], list[Transform]]
) -> Schema:
    """A copy with these boundaries for `quantiles`, and with changed transforms."""
    by_quantiles = [isinstance(spec, Buckets) and spec.quantiles is not None for spec in schema.derived]
    update = {"boundaries": boundaries}
    derived = [s.model_copy(update=update) if q else s for s, q in zip(schema.derived, by_quantiles, strict=True)]
    dense = [f.model_copy(update={"transforms": steps(f.transforms)}) for f in schema.dense]
    return schema.model_copy(update={"derived": derived, "dense": dense})


def _unfitted(step: Transform) -> Transform:
    if not isinstance(step, Fitted):
        return step
    statistics_fields = {"mean", "std", "lowest", "highest", "boundaries"} & set(type(step).model_fields)
    return step.model_copy(update=dict.fromkeys(statistics_fields))


def _sample(data: Manifest | Mix, columns: list[str], rows: int) -> pa.Table:
    """About `rows` rows from windows spread over each data set."""
    tables, uris = list[pa.Table](), list[str]()
    for manifest in data.parts:
        remaining = -(-rows // len(data.parts))
        for number in _spread(len(manifest.windows)):
            table, problems = read_window(manifest, number)
            if problems:
                raise problems.error(int(problems.rows()[0]))
            tables.append(table.select(columns).slice(0, remaining))
            uris.append(manifest.files.take(np.zeros(1, np.int64))[0].uri)
            remaining -= len(tables[-1])
            if remaining <= 0:
                break
    return concatenated(tables, uris, rounded=True).combine_chunks()


def _spread(count: int) -> Iterator[int]:
    """The numbers `[0, count)` in an order in which every prefix is spread evenly (golden ratio sequence)."""
    yield from np.argsort(np.arange(count) * 0.6180339887498949 % 1.0, kind="stable").tolist()


def _finite(array: pa.Array, name: str) -> Floats:
    """The finite numbers of an array or of its lists, ascending."""
    numbers = floats_of(unnest(array).leaf if is_list(array.type) else array)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    if not len(numbers):
        raise DataError(f"{name!r} has no numbers in the training data", fix="remove the feature")
    return numbers


def _fitted(feature: DenseFeature, array: pa.Array) -> DenseFeature:
    """Fits each transform to the output of the previous ones, without nulls."""
    if all(not isinstance(step, Fitted) or step.fitted for step in feature.transforms):
        return feature
    numbers = _finite(array, feature.name)
    steps: list[Transform] = []
    for step in feature.transforms:
        if isinstance(step, Fitted) and not step.fitted:
            step = _fitted_step(step, np.sort(numbers[np.isfinite(numbers)]), feature.name)
        with np.errstate(all="ignore"):
            numbers = transformed(numbers, [step])
        steps.append(step)
    return feature.model_copy(update={"transforms": steps})


def _fitted_step(step: Fitted, ascending: Floats, name: str) -> Transform:
    if not len(ascending) or ascending[0] == ascending[-1]:
        fix = "remove the feature, or set the statistics by hand"
        raise DataError(f"dense feature {name!r} has the same value in all training rows", fix=fix)
    match step:
        case Standardize():
            mean, std = (float(f"{statistic:.{_DIGITS}g}") for statistic in (ascending.mean(), ascending.std()))
            return Standardize(mean=mean, std=std)
        case MinMax():
            return MinMax(lowest=float(ascending[0]), highest=float(ascending[-1]))
        case Quantile():
            return Quantile(quantiles=step.quantiles, boundaries=quantiles(ascending, step.quantiles))
