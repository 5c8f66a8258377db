"""What a row is trained towards and measured by: its labels, how much it counts, whom it belongs to, when it was."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.mapping.arrow_types import is_text
from rayrec.data.mapping.hashing import hash_strings, seed_of
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Targets
from rayrec.data.mapping.schema import Group, SampleWeight, Schema, Task, Timestamp
from rayrec.data.mapping.sequences import UNITS

F32 = npt.NDArray[np.float32]
I64 = npt.NDArray[np.int64]

LATEST_S = 7_258_118_400  # 2200-01-01
_GROUPS = 3  # keeps the hashes of groups apart from other ones


def map_targets(columns: Mapping[str, pa.Array], schema: Schema, problems: Problems) -> Targets:
    """All that the schema says of the rows beside their features; bad ones are noted in `problems`."""
    return Targets(
        label=_labels(columns, schema, problems),
        weight=None if schema.sample_weight is None else _weight(columns, schema.sample_weight, problems),
        group=None if schema.group is None else _group(columns[schema.group.column], schema.group, problems),
        time=None if schema.timestamp is None else _seconds(columns, schema.timestamp, problems),
    )


def unknown_targets(schema: Schema, num_rows: int) -> Targets:
    """Those of rows whose labels are not known yet: NaN, and nothing beside them."""
    return Targets(label=np.full((num_rows, *schema.label_shape), np.nan, np.float32))


def _group(array: pa.Array, group: Group, problems: Problems) -> I64:
    """Integers as they are, texts as 64-bit hashes."""
    if array.null_count:
        problems.add(
            np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)),
            group.column,
            lambda _: "the group is null",
            lambda _: None,
            "fill the nulls, rows that belong together with one value",
        )
    if not is_text(array.type):
        plain = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        numbers: I64 = pc.cast(plain, pa.int64(), safe=False).fill_null(0).to_numpy(zero_copy_only=False)
        return numbers
    encoded = array if pa.types.is_dictionary(array.type) else array.dictionary_encode()
    texts = encoded.dictionary.cast(pa.large_binary()).fill_null(b"").to_pylist()
    hashes = hash_strings(texts, seed_of(_GROUPS)).view(np.int64)
    index = encoded.indices.fill_null(0).to_numpy(zero_copy_only=False)
    return np.take(hashes, index) if len(hashes) else np.zeros(len(array), np.int64)


def _seconds(columns: Mapping[str, pa.Array], timestamp: Timestamp, problems: Problems) -> I64:
    """Since 1970, rounded down."""
    array = columns[timestamp.column]
    unit = timestamp.unit
    if pa.types.is_date32(array.type):
        array = array.cast(pa.timestamp("s"))
    elif pa.types.is_date64(array.type):
        array = array.cast(pa.timestamp("ms"))
    if pa.types.is_timestamp(array.type):
        unit = array.type.unit
    elif pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    numbers = pc.cast(array, pa.int64(), safe=False).fill_null(-1).to_numpy(zero_copy_only=False)
    seconds: I64 = np.floor_divide(numbers, UNITS[unit])
    bad = np.flatnonzero((seconds < 0) | (seconds >= LATEST_S))
    if len(bad):
        column = columns[timestamp.column]
        problems.add(
            bad,
            timestamp.column,
            lambda _: "the timestamp must lie between 1970 and 2200",
            lambda k: str(column[int(bad[k])]),
            "correct the column, or the unit of its integers (schema.timestamp.unit)",
        )
        seconds[bad] = 0
    return seconds


def _weight(columns: Mapping[str, pa.Array], weight: SampleWeight, problems: Problems) -> F32:
    """The rows' weights; null, negative and infinite ones are noted in `problems`."""
    array = columns[weight.column]
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    numbers = pc.cast(array, pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        values = numbers.astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        problems.add(
            bad,
            weight.column,
            lambda _: "the sample weight must be a finite number of at least 0",
            lambda k: str(array[int(bad[k])].as_py()),
            "remove the row or correct its weight; 0 leaves a row out of loss and figures",
        )
        values[bad] = 0
    return values


def _labels(columns: Mapping[str, pa.Array], schema: Schema, problems: Problems) -> F32:
    """[n] for one label, [n, T] for several, NaN where one was not observed; bad ones are noted in `problems`."""
    labels = [_label(columns[task.column], task, problems) for task in schema.tasks]
    return labels[0] if schema.label is not None else np.stack(labels, axis=1)


def _label(array: pa.Array, task: Task, problems: Problems) -> F32:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else None
    if nulls is not None and task.on_null == "error":
        problems.add(
            nulls,
            task.column,
            lambda _: "the label is null",
            lambda _: None,
            "remove the row or fill the label with 0 or 1; one of several labels may also have `on_null: ignore`",
        )
    if task.positive is not None:
        labels = _equal_label(array, task, problems)
    else:
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
        of = _binary_label if task.kind == "binary" else _number_label
        labels = (of if task.at_least is None else _large_label)(array, task, problems)
    if nulls is not None and task.on_null == "ignore":
        labels[nulls] = np.nan
    return labels


def _equal_label(array: pa.Array, task: Task, problems: Problems) -> F32:
    """1 where the column has the positive value; of a null 0."""
    found = array.cast(pa.large_binary()) if is_text(array.type) else array

    def has(value: str | int | None) -> npt.NDArray[np.bool_]:
        same = pc.equal(found, value.encode() if isinstance(value, str) else value)
        return np.asarray(same.fill_null(False).to_numpy(zero_copy_only=False), np.bool_)

    positive = has(task.positive)
    if task.negative is not None:
        bad = np.flatnonzero(~(positive | has(task.negative) | array.is_null().to_numpy(zero_copy_only=False)))
        if len(bad):
            problems.add(
                bad,
                task.column,
                lambda _: f"the label must be {task.positive!r} or {task.negative!r}",
                lambda k: repr(array[int(bad[k])].as_py()),
                "correct the value, or take `negative` out of the label: then all but the positive value are 0",
            )
    return positive.astype(np.float32)


def _large_label(array: pa.Array, task: Task, problems: Problems) -> F32:
    """1 from a number on."""
    numbers = pc.cast(array, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    bad = np.flatnonzero(np.isnan(numbers))
    if len(bad):
        fix = "remove the row or correct its label"
        problems.add(bad, task.column, lambda _: "the label must be a number", lambda _: "nan", fix)
    return (numbers >= task.at_least).astype(np.float32)


def _binary_label(array: pa.Array, task: Task, problems: Problems) -> F32:
    values = array.to_numpy(zero_copy_only=False)
    bad = np.flatnonzero((values != 0) & (values != 1))
    if len(bad):
        problems.add(
            bad,
            task.column,
            lambda _: "the label must be 0 or 1",
            lambda k: str(values[bad[k]]),
            f"say what counts as 1: label: {{column: {task.column}, at_least: NUMBER}} or positive: VALUE; or predict "
            "the number itself: `kind: number`",
        )
    labels: F32 = values.astype(np.float32)
    return labels


def _number_label(array: pa.Array, task: Task, problems: Problems) -> F32:
    numbers = pc.cast(array, pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        labels: F32 = numbers.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(labels))
    if len(bad):
        problems.add(
            bad,
            task.column,
            lambda _: "the label must be a finite number",
            lambda k: str(array[int(bad[k])].as_py()),
            "remove the row or correct its label",
        )
        labels[bad] = 0
    return labels
