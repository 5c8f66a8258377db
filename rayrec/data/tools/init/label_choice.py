"""Which column is predicted, and which of its values count as 1: as the user says it, or as the columns look."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, is_list, is_text
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.schema import Task
from rayrec.data.mapping.targets import map_label
from rayrec.data.tools.init.column_facts import ColumnFacts
from rayrec.storage.errors import DataError, suggestion

LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y")
_MOST_SHOWN = 5
USAGE = "--label COLUMN, --label 'COLUMN=VALUE' or --label 'COLUMN>=NUMBER'"


@dataclass(frozen=True, slots=True)
class LabelChoice:
    """What is predicted.

    Args:
        schema: `schema.label` of a train config.
        positives: [n], which of the inspected rows have label 1.
        why: how it was chosen.
    """

    column: str
    schema: dict[str, Any]
    positives: npt.NDArray[np.bool_]
    why: str

    @classmethod
    def of(cls, schema: dict[str, Any], array: pa.Array, why: str) -> LabelChoice:
        """That of a label and its column's values."""
        labels = map_label(array, Task(name="label", **schema), Problems())
        return cls(schema["column"], schema, labels == 1, why)


def choose_label(table: pa.Table, binary: Sequence[str], wanted: str | None) -> LabelChoice | None:
    """
    Args:
        binary: the columns that hold 0 and 1 only.
        wanted: COLUMN, COLUMN=VALUE or COLUMN>=NUMBER; None: the best named, or the last, of the binary ones.

    Raises:
        DataError: there is no such column or value, or the column needs one.
    """
    if wanted is not None:
        return _given(table, wanted)
    column = next((name for known in LABEL_NAMES for name in binary if name.lower() == known), None)
    why = "by its name"
    if column is None and binary:
        which = "the only column" if len(binary) == 1 else f"the last of {len(binary)} columns"
        column, why = binary[-1], f"{which} of 0 and 1 only, no --label was given"
    return None if column is None else LabelChoice.of({"column": column}, _values(table, column), why)


def suggested_labels(columns: Sequence[ColumnFacts]) -> str:
    """What to do where no column looks like a label."""
    pairs = [(c.name, c.values_seen) for c in columns[::-1] if c.role == "id" and c.distinct == 2]
    numbers = [c for c in columns if c.role == "dense" and c.mean is not None and not c.log]
    found = [f"{name}={seen[1]}" for name, seen in pairs if seen is not None] + [
        f"{c.name}>={c.mean:.2g}" for c in numbers
    ]
    examples = ", ".join(f"--label '{text}'" for text in found[:3])
    return f"say what is predicted: {USAGE}{f'; here perhaps {examples}' if examples else ''}"


def _given(table: pa.Table, wanted: str) -> LabelChoice:
    column, sign, value = _parts(wanted, table.column_names)
    if table.column_names.count(column) != 1:
        hint = suggestion(column, table.column_names)
        raise DataError(f"--label {wanted}: there is no column {column!r}{hint}", fix=f"give {USAGE}")
    array = _values(table, column)
    if is_list(array.type) or pat.is_struct(array.type):
        raise DataError(f"a label has one value a row, not a {array.type}", column=column, fix=f"give {USAGE}")
    missing = array.null_count + (np.isnan(array.drop_null()).sum() if pat.is_floating(array.type) else 0)
    if missing:
        problem = f"the label is missing in {missing:,} of {len(array):,} rows that were looked at"
        raise DataError(problem, column=column, fix="leave these rows out of the files, or take another label")
    match sign:
        case ">=":
            return _from_number_on(array, column, value)
        case "=":
            return _one_value(array, column, value)
        case _:
            return _two_values(array, column)


def _parts(wanted: str, columns: Sequence[str]) -> tuple[str, str, str]:
    """Column, sign and value; a name that has such a sign itself is a name."""
    if wanted in columns:
        return wanted, "", ""
    sign = next((sign for sign in (">=", "=") if sign in wanted), "")
    column, _, value = wanted.partition(sign) if sign else (wanted, "", "")
    return column.strip(), sign, value


def _values(table: pa.Table, column: str) -> pa.Array:
    array = decoded(table.column(column).combine_chunks())
    return array.cast(pa.large_string()) if is_text(array.type) else array


def _two_values(array: pa.Array, column: str) -> LabelChoice:
    """Of 0 and 1 the label itself; of two other values the rarer one is 1."""
    values = _by_count(array)
    if len(values) == 2 and set(values) == {0, 1}:
        return LabelChoice.of({"column": column}, array, "by --label")
    comparable = is_text(array.type) or pat.is_integer(array.type)
    if len(values) == 2 and comparable:
        other, rare = values
        schema = {"column": column, "positive": rare, "negative": other}
        why = f"the rarer of its two values, {rare!r}, is 1; the other way: --label '{column}={other}'"
        return LabelChoice.of(schema, array, why)
    _refuse_one_value(values, column)
    ways = [f"--label '{column}={values[0]}'"] if comparable else []
    if isinstance(values[0], int | float):
        ways.append(f"--label '{column}>={sorted(values)[len(values) // 2]:g}'")
    fix = f"say which count as 1, e.g. {' or '.join(ways)}" if ways else f"give {USAGE}"
    raise DataError(f"the label has {len(values):,} values, not two: {_shown(values)}", column=column, fix=fix)


def _one_value(array: pa.Array, column: str, text: str) -> LabelChoice:
    if not (is_text(array.type) or pat.is_integer(array.type)):
        problem = f"--label {column}={text} compares texts or integers; the column holds {array.type}"
        raise DataError(
            problem, column=column, fix=f"give the number from which on it is 1: --label '{column}>=NUMBER'"
        )
    values = _by_count(array)
    known = {str(value).strip(): value for value in values[::-1]} | {str(value): value for value in values}
    positive = known.get(text, known.get(text.strip()))
    if positive is None:
        problem = f"no row has the value {text!r}; the column has {_shown(values)}"
        raise DataError(problem, column=column, fix="give one of them")
    _refuse_one_value(values, column)
    others = [value for value in values if value != positive]
    schema = {"column": column, "positive": positive} | ({"negative": others[0]} if len(others) == 1 else {})
    return LabelChoice.of(schema, array, "by --label")


def _from_number_on(array: pa.Array, column: str, text: str) -> LabelChoice:
    try:
        least, numbers = float(text), array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except (ValueError, pa.ArrowException) as error:
        problem = f"--label {column}>={text} compares numbers; the column holds {array.type}"
        raise DataError(problem, column=column, fix=f"give {USAGE}") from error
    chosen = LabelChoice.of({"column": column, "at_least": least}, array, "by --label")
    if chosen.positives.all() or not chosen.positives.any():
        which = "every row is" if chosen.positives.all() else "no row is"
        problem = f"{which} at least {least:g}; the column goes from {numbers.min():g} to {numbers.max():g}"
        raise DataError(problem, column=column, fix="give a number between them")
    return chosen


def _by_count(array: pa.Array) -> list[Any]:
    """The different values, the most frequent first, equal counts by value."""
    counts = array.value_counts()
    pairs = zip(counts.field("counts").to_pylist(), counts.field("values").to_pylist(), strict=True)
    return [value for _, value in sorted(pairs, key=lambda pair: (-pair[0], pair[1]))]


def _refuse_one_value(values: Sequence[Any], column: str) -> None:
    if len(values) == 1:
        problem = f"the label is {values[0]!r} in every row that was looked at: nothing can be learnt from it"
        raise DataError(problem, column=column, fix="take another column, or add rows of the other kind")


def _shown(values: Sequence[Any]) -> str:
    return ", ".join(map(repr, values[:_MOST_SHOWN])) + (", …" if len(values) > _MOST_SHOWN else "")
