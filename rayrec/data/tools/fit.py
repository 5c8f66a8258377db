"""Computes the statistics that a schema leaves out (boundaries, means, ends) from the training data alone.

They become part of the schema, and so of the config, the run, the export and the fingerprint. Up to `SAMPLE_ROWS` rows
are held in memory, of windows spread over the data; of smaller data sets the statistics are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from rayrec.data.arrays.arrow_types import floats_of, is_list
from rayrec.data.arrays.buffers import Floats
from rayrec.data.arrays.lists import unnest
from rayrec.data.mapping.column_types import check_types
from rayrec.data.mapping.dense import transformed
from rayrec.data.mapping.derived.derive import derive
from rayrec.data.mapping.derived.specs import Buckets, Derived
from rayrec.data.mapping.map_rows import one_array
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.schema import DenseFeature, Schema
from rayrec.data.mapping.transforms import Fitted, MinMax, Quantile, Standardize, Transform
from rayrec.data.order.mix import Mix
from rayrec.data.source.manifest import Manifest
from rayrec.data.stream.reading import read_window
from rayrec.data.tools.quantiles import bucket_edges, quantiles
from rayrec.storage.errors import DataError

SAMPLE_ROWS = 1_000_000
_DIGITS = 9  # significant digits of what is written: float32 has 7


def unfitted_names(schema: Schema) -> list[str]:
    """The derived columns and features that wait for statistics."""
    derived = [spec.name for spec in schema.derived if isinstance(spec, Buckets) and spec.edges is None]
    steps = [(feature.name, step) for feature in schema.dense for step in feature.transforms]
    return derived + [name for name, step in steps if isinstance(step, Fitted) and not step.fitted]


def without_statistics(schema: Schema) -> Schema:
    """The schema with all statistics to be fitted anew."""
    return _changed(schema, None, lambda steps: [_unfitted(step) for step in steps])


def fit(data: Manifest | Mix, schema: Schema, sample_rows: int = SAMPLE_ROWS) -> Schema:
    """The schema with every statistic that it left out.

    Args:
        data: what is trained on, with its filters; its manifest is made with `for_reading(schema)`.

    Raises:
        DataError: a column that holds no numbers, or one number only.
    """
    table = _sample(data, schema.feature_columns, sample_rows)
    columns = {name: one_array(table.column(name)) for name in table.column_names}
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
    """The parts of a config's `schema` that hold statistics, as plain values."""
    plain = schema.model_dump(mode="json", exclude_unset=True, include={"dense", "derived"})
    for feature, given in zip(schema.dense, plain.get("dense", []), strict=True):
        steps = [step.model_dump(mode="json", exclude_none=True) for step in feature.transforms]
        given |= {"transforms": steps} if steps else {}
    return {name: part for name, part in plain.items() if part}


def for_reading(schema: Schema) -> Schema:
    """A schema that reads the same columns and whose manifest can be made before anything is fitted."""
    return _changed(schema, [0.0], lambda steps: [step for step in steps if not isinstance(step, Fitted)])


def _changed(
    schema: Schema, boundaries: list[float] | None, steps: Callable[[list[Transform]], list[Transform]]
) -> Schema:
    """With these boundaries in place of quantiles, and other transforms."""
    by_quantiles = [isinstance(spec, Buckets) and spec.quantiles is not None for spec in schema.derived]
    update = {"boundaries": boundaries}
    derived = [s.model_copy(update=update) if q else s for s, q in zip(schema.derived, by_quantiles, strict=True)]
    dense = [f.model_copy(update={"transforms": steps(f.transforms)}) for f in schema.dense]
    return schema.model_copy(update={"derived": derived, "dense": dense})


def _unfitted(step: Transform) -> Transform:
    if not isinstance(step, Fitted):
        return step
    found = {"mean", "std", "lowest", "highest", "boundaries"} & set(type(step).model_fields)
    return step.model_copy(update=dict.fromkeys(found))


def _sample(data: Manifest | Mix, columns: list[str], rows: int) -> pa.Table:
    """Windows spread over each part of the data, about so many rows in all."""
    tables = list[pa.Table]()
    for part in data.parts:
        wanted = -(-rows // len(data.parts))
        for number in _spread(len(part.windows)):
            table, problems = read_window(part, number)
            if problems:
                raise problems.error(int(problems.rows()[0]))
            tables.append(table.select(columns).slice(0, wanted))
            wanted -= len(tables[-1])
            if wanted <= 0:
                break
    return pa.concat_tables(tables, promote_options="permissive").combine_chunks()


def _spread(count: int) -> Iterator[int]:
    """All of `[0, count)` so that any number of the first ones are spread over it."""
    yield from np.argsort(np.arange(count) * 0.6180339887498949 % 1.0, kind="stable").tolist()


def _finite(array: pa.Array, name: str) -> Floats:
    """The finite numbers of an array, or of its lists, ascending."""
    numbers = floats_of(unnest(array).leaf if is_list(array.type) else array)
    numbers = np.sort(numbers[np.isfinite(numbers)])
    if not len(numbers):
        raise DataError(f"{name!r} has no numbers in the training data to fit to", fix="take the feature out")
    return numbers


def _fitted(feature: DenseFeature, array: pa.Array) -> DenseFeature:
    """Each step is fitted to what those before it give; nulls do not count."""
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
        fix = "take the feature out, or give the statistics by hand"
        raise DataError(f"dense feature {name!r} has one value in all training rows", fix=fix)
    match step:
        case Standardize():
            mean, std = (float(f"{one:.{_DIGITS}g}") for one in (ascending.mean(), ascending.std()))
            return Standardize(mean=mean, std=std)
        case MinMax():
            return MinMax(lowest=float(ascending[0]), highest=float(ascending[-1]))
        case Quantile():
            return Quantile(quantiles=step.quantiles, boundaries=quantiles(ascending, step.quantiles))
