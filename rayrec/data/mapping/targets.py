"""Maps the columns of labels, sample weights, groups and timestamps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.arrays.arrow_types import LATEST_S, decoded, floats_of, is_text, nulls_of, seconds_of, shown
from rayrec.data.arrays.buffers import F32, I64
from rayrec.data.arrays.hashing import hash_strings, seed_of
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Targets
from rayrec.data.mapping.schema import Group, SampleWeight, Schema, Task, Timestamp

# Seed that distinguishes the hashes of groups from other hashes.
_GROUPS = 3


def map_targets(columns: Mapping[str, pa.Array], schema: Schema, problems: Problems) -> Targets:
    """Maps all columns of the schema that are not features. Adds bad rows to `problems`."""
    return Targets(
        label=_labels(columns, schema, problems),
        weight=None if schema.sample_weight is None else _weight(columns, schema.sample_weight, problems),
        group=None if schema.group is None else _group(columns[schema.group.column], schema.group, problems),
        time=None if schema.timestamp is None else _seconds(columns, schema.timestamp, problems),
    )


def unknown_targets(schema: Schema, num_rows: int) -> Targets:
    """Targets of rows without labels: NaN."""
    return Targets(label=np.full((num_rows, *schema.label_shape), np.nan, np.float32))


def _group(array: pa.Array, group: Group, problems: Problems) -> I64:
    """Integers unchanged, texts as 64-bit hashes."""
    fix = "fill the nulls, with the same value for rows of one group"
    problems.add_nulls(array, group.column, "the group is null", fix)
    if not is_text(array.type):
        numbers: I64 = pc.cast(decoded(array), pa.int64(), safe=False).fill_null(0).to_numpy(zero_copy_only=False)
        return numbers
    encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    texts = encoded.dictionary.cast(pa.large_binary()).fill_null(b"").to_pylist()
    hashes = hash_strings(texts, seed_of(_GROUPS)).view(np.int64)
    index = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return np.take(hashes, index) if len(hashes) else np.zeros(len(array), np.int64)


def _seconds(columns: Mapping[str, pa.Array], timestamp: Timestamp, problems: Problems) -> I64:
    """Seconds since 1970, rounded down."""
    array = columns[timestamp.column]
    seconds = seconds_of(array, timestamp.unit)
    bad = np.flatnonzero((seconds < 0) | (seconds >= LATEST_S))
    problem = "the timestamp must be between 1970 and 2200"
    fix = "correct the column, or schema.timestamp.unit if it holds integers"
    problems.add(bad, timestamp.column, problem, fix, lambda k: shown(array, int(bad[k])))
    seconds[bad] = 0
    return seconds


def _weight(columns: Mapping[str, pa.Array], weight: SampleWeight, problems: Problems) -> F32:
    """The sample weights. Adds rows with null, negative or infinite weights to `problems`."""
    array = columns[weight.column]
    with np.errstate(over="ignore"):
        values = floats_of(array).astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    problem = "the sample weight must be a finite number of at least 0"
    fix = "remove the row or correct its weight; 0 excludes a row from loss and metrics"
    problems.add(bad, weight.column, problem, fix, lambda k: str(array[int(bad[k])].as_py()))
    values[bad] = 0
    return values


def _labels(columns: Mapping[str, pa.Array], schema: Schema, problems: Problems) -> F32:
    """[n] for one label, [n, T] for several; NaN where a label was not observed. Adds bad rows to `problems`."""
    labels = [map_label(columns[task.column], task, problems) for task in schema.tasks]
    if schema.label is not None:
        return labels[0]
    by_name = dict(zip((task.name for task in schema.tasks), labels, strict=True))
    observed = [
        np.where(by_name[task.given] == 1, by_name[task.name], np.nan) if task.given else by_name[task.name]
        for task in schema.tasks
    ]
    return np.stack(observed, axis=1).astype(np.float32, copy=False)


def map_label(array: pa.Array, task: Task, problems: Problems) -> F32:
    """Maps a column to a label. Adds bad rows to `problems`."""
    array = decoded(array)
    nulls = nulls_of(array)
    if task.on_null == "error":
        fix = "remove the row or set its label to 0 or 1; one of several labels may also have `on_null: ignore`"
        problems.add_nulls(array, task.column, "the label is null", fix)
    if task.positive is not None:
        labels = _equal_label(array, task, problems)
    else:
        if nulls is not None:
            array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
        map_values = _binary_label if task.kind == "binary" else _number_label
        labels = (map_values if task.at_least is None else _large_label)(array, task, problems)
    if nulls is not None and task.on_null == "ignore":
        labels[nulls] = np.nan
    return labels


def _equal_label(array: pa.Array, task: Task, problems: Problems) -> F32:
    """1 for the positive value, else 0; 0 for nulls."""
    values = array.cast(pa.large_binary()) if is_text(array.type) else array

    def has(value: str | int | None) -> npt.NDArray[np.bool_]:
        same = pc.equal(values, value.encode() if isinstance(value, str) else value)
        return np.asarray(same.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)

    positive = has(task.positive)
    if task.negative is not None:
        bad = np.flatnonzero(~(positive | has(task.negative) | array.is_null().to_numpy(zero_copy_only=False)))
        problem = f"the label must be {task.positive!r} or {task.negative!r}"
        fix = "correct the value, or remove `negative` from the label: then all other values are 0"
        problems.add(bad, task.column, problem, fix, lambda k: shown(array, int(bad[k]), repr))
    return positive.astype(np.float32)


def _large_label(array: pa.Array, task: Task, problems: Problems) -> F32:
    """1 for numbers of at least `at_least`, else 0."""
    assert task.at_least is not None
    numbers = floats_of(array)
    bad, fix = np.flatnonzero(np.isnan(numbers)), "remove the row or correct its label"
    problems.add(bad, task.column, "the label must be a number", fix, lambda _: "nan")
    return (numbers >= task.at_least).astype(np.float32)


def _binary_label(array: pa.Array, task: Task, problems: Problems) -> F32:
    values = array.to_numpy(zero_copy_only=False)
    bad = np.flatnonzero((values != 0) & (values != 1))
    fix = f"set the values that count as 1: label: {{column: {task.column}, at_least: NUMBER}} or positive: VALUE"
    fix += "; or predict the number itself: `kind: number`"
    problems.add(bad, task.column, "the label must be 0 or 1", fix, lambda k: str(values[bad[k]]))
    labels: F32 = values.astype(np.float32)
    return labels


def _number_label(array: pa.Array, task: Task, problems: Problems) -> F32:
    with np.errstate(over="ignore"):
        labels: F32 = floats_of(array).astype(np.float32)
    bad, fix = np.flatnonzero(~np.isfinite(labels)), "remove the row or correct its label"
    problem = "the label must be a finite number"
    problems.add(bad, task.column, problem, fix, lambda k: str(array[int(bad[k])].as_py()))
    labels[bad] = 0
    return labels
