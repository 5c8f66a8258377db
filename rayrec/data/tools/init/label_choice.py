"""Chooses the label column and the values that count as 1: from `--label`, or by the look of the columns."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, is_list, is_text
from rayrec.data.formats.text_cells import NUMBER
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.schema import Task
from rayrec.data.mapping.targets import map_label
from rayrec.data.tools.init.column_facts import ColumnFacts, plain_number
from rayrec.storage.errors import DataError, suggestion

LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y")
# Values that are likely to count as 1.
_POSITIVE = frozenset(
    {
        *("1", "true", "t", "yes", "y", "ja", "oui", "si", "positive"),
        *("purchase", "buy", "bought", "order", "conversion", "click", "clicked", "like"),
    }
)
_FEW = 5
_VALUES_SHOWN = 5
MOST_NAMED = 20  # columns in an error
USAGE = "--label COLUMN, --label 'COLUMN=VALUE' or --label 'COLUMN>=NUMBER'"


@dataclass(frozen=True, slots=True)
class LabelChoice:
    """The chosen label.

    Args:
        schema: `schema.label` of a train config.
        positives: [n], True for inspected rows with label 1.
        why: how it was chosen.
    """

    column: str
    schema: dict[str, Any]
    positives: npt.NDArray[np.bool_]
    why: str

    @classmethod
    def of(cls, schema: dict[str, Any], array: pa.Array, why: str) -> LabelChoice:
        """The choice of a label, given the values of its column."""
        labels = map_label(array, Task(name="label", **schema), Problems())
        return cls(schema["column"], schema, labels == 1, why)


def choose_labels(table: pa.Table, binary: Sequence[str], wanted: Sequence[str]) -> list[LabelChoice]:
    """The labels of `--label` options, or the label by the look of the columns; none if no column looks like one.

    Raises:
        DataError: as `choose_label`; two labels of one column.
    """
    options: Sequence[str | None] = wanted or [None]
    chosen = [choose_label(table, binary, text) for text in options]
    labels = [label for label in chosen if label is not None]
    for number, label in enumerate(labels):
        if label.column in (earlier.column for earlier in labels[:number]):
            raise DataError("two --label options name this column", column=label.column, fix="leave one of them out")
    return labels


def choose_label(table: pa.Table, binary: Sequence[str], wanted: str | None) -> LabelChoice | None:
    """Chooses the label.

    Args:
        binary: the columns that contain only 0 and 1. Columns of floats count only if there is no other, except
            by name.
        wanted: COLUMN, COLUMN=VALUE or COLUMN>=NUMBER; None: a binary column, by its name or else the last one.

    Raises:
        DataError: an unknown column or value, or a column that needs a value.
    """
    if wanted is not None:
        return _from_option(table, wanted)
    column = next((name for label_name in LABEL_NAMES for name in binary if name.lower() == label_name), None)
    explanation = "by its name"
    binary = [name for name in binary if not pat.is_floating(table.schema.field(name).type)] or binary
    if column is None and binary:
        reason = "the only column" if len(binary) == 1 else f"the last of {len(binary)} columns"
        column, explanation = binary[-1], f"{reason} with only 0 and 1; no --label was given"
    return None if column is None else LabelChoice.of({"column": column}, _values(table, column), explanation)


def suggested_labels(columns: Sequence[ColumnFacts]) -> str:
    """The fix for a data set in which no column looks like a label."""
    complete = [c for c in columns if not c.nulls]
    examples = [text for c in complete[::-1] if (text := _positive_value(c)) is not None]
    examples += [f"{c.name}>={plain_number(_middle(c.mean, c.edges), 2)}" for c in complete if _may_have_a_bound(c)]
    options = ", ".join(f"--label '{text}'" for text in examples[:3])
    fix = f"name the label: {USAGE}" + (f"; possibly {options}" if options else "")
    missing = [c for c in columns if c.nulls and c.name.lower() in LABEL_NAMES]
    return fix + "".join(f"; {c.name!r} is null in {c.nulls:,} rows: remove them to use it" for c in missing)


def _positive_value(facts: ColumnFacts) -> str | None:
    """COLUMN=VALUE, for one of two ids or of a few texts; the value that is likely the positive one."""
    seen = facts.values_seen
    if facts.role != "id" or seen is None or not (len(seen) == 2 or (is_text(seen.type) and 2 < len(seen) <= _FEW)):
        return None
    values = list(map(str, seen.to_pylist()))
    return f"{facts.name}={next((v for v in values if v.lower() in _POSITIVE), values[-1])}"


def _may_have_a_bound(facts: ColumnFacts) -> bool:
    return facts.role == "dense" and facts.mean is not None and not (facts.log or facts.unique or facts.width > 1)


def _middle(mean: float | None, edges: Sequence[float]) -> float:
    """The first value of the column from its mean on, as far as it is known."""
    assert mean is not None
    return next((edge for edge in edges if edge >= mean), mean)


def _from_option(table: pa.Table, wanted: str) -> LabelChoice:
    column, sign, value = _split_option(wanted, table.column_names)
    if table.column_names.count(column) != 1:
        hint = suggestion(column, table.column_names)
        names = ", ".join(table.column_names[:MOST_NAMED])
        names += f" and {table.num_columns - MOST_NAMED} more" if table.num_columns > MOST_NAMED else ""
        problem = f"--label {wanted}: there is no column {column!r}{hint}; the columns are {names}"
        raise DataError(problem, fix=f"use {USAGE}")
    array = _values(table, column)
    if is_list(array.type) or pat.is_struct(array.type):
        raise DataError(f"a label needs one value per row, not a {array.type}", column=column, fix=f"use {USAGE}")
    missing = array.null_count + (np.isnan(array.drop_null()).sum() if pat.is_floating(array.type) else 0)
    if missing:
        problem = f"the label is missing in {missing:,} of {len(array):,} inspected rows"
        raise DataError(problem, column=column, fix="remove these rows from the files, or choose another label")
    match sign:
        case ">=":
            return _from_number_on(array, column, value)
        case "=":
            return _one_value(array, column, value)
        case _:
            return _two_values(array, column)


def _split_option(wanted: str, columns: Sequence[str]) -> tuple[str, str, str]:
    """Splits into column, operator and value. A column name that contains an operator is not split."""
    if wanted in columns:
        return wanted, "", ""
    sign = next((sign for sign in (">=", "=") if sign in wanted), "")
    column, _, value = wanted.partition(sign) if sign else (wanted, "", "")
    return column.strip(), sign, value


def _values(table: pa.Table, column: str) -> pa.Array:
    array = decoded(table.column(column).combine_chunks())
    return array.cast(pa.large_string()) if is_text(array.type) else array


def _two_values(array: pa.Array, column: str) -> LabelChoice:
    """A column with two values: 0 and 1 as they are; otherwise the rarer value is 1."""
    values = _by_count(array)
    if len(values) == 2 and set(values) == {0, 1}:
        return LabelChoice.of({"column": column}, array, "by --label")
    comparable = is_text(array.type) or pat.is_integer(array.type)
    if len(values) == 2 and comparable:
        other_value, rare = values
        schema = {"column": column, "positive": rare, "negative": other_value}
        explanation = f"the rarer of its two values, {rare!r}, is 1; for the opposite: --label '{column}={other_value}'"
        return LabelChoice.of(schema, array, explanation)
    _refuse_one_value(values, column)
    examples = [f"--label '{column}={values[0]}'"] if comparable else []
    if isinstance(values[0], int | float):
        examples.append(f"--label '{column}>={plain_number(sorted(values)[len(values) // 2])}'")
    fix = f"specify the values that count as 1, e.g. {' or '.join(examples)}" if examples else f"use {USAGE}"
    raise DataError(f"the label has {len(values):,} values, not two: {_shown(values)}", column=column, fix=fix)


def _one_value(array: pa.Array, column: str, text: str) -> LabelChoice:
    if not (is_text(array.type) or pat.is_integer(array.type)):
        problem = f"--label {column}={text} compares texts or integers; the column has type {array.type}"
        raise DataError(
            problem, column=column, fix=f"give the smallest number that counts as 1: --label '{column}>=NUMBER'"
        )
    values = _by_count(array)
    by_text = {str(value).strip(): value for value in values[::-1]} | {str(value): value for value in values}
    positive = by_text.get(text, by_text.get(text.strip()))
    if positive is None:
        problem = f"no row has the value {text!r}; the column has {_shown(values)}"
        raise DataError(problem, column=column, fix="use one of them")
    _refuse_one_value(values, column)
    other_values = [value for value in values if value != positive]
    schema = {"column": column, "positive": positive} | (
        {"negative": other_values[0]} if len(other_values) == 1 else {}
    )
    return LabelChoice.of(schema, array, "by --label")


def _from_number_on(array: pa.Array, column: str, text: str) -> LabelChoice:
    if not re.fullmatch(NUMBER, text.strip()):
        raise DataError(f"--label {column}>={text}: {text!r} is not a number", column=column, fix=f"use {USAGE}")
    try:
        threshold, numbers = float(text), array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    except (ValueError, pa.ArrowException) as error:
        problem = f"--label {column}>={text} compares numbers; the column has type {array.type}"
        raise DataError(problem, column=column, fix=f"use {USAGE}") from error
    choice = LabelChoice.of({"column": column, "at_least": threshold}, array, "by --label")
    if choice.positives.all() or not choice.positives.any():
        subject = "every row is" if choice.positives.all() else "no row is"
        problem = f"{subject} at least {plain_number(threshold)}; the column ranges from "
        problem += f"{plain_number(numbers.min())} to {plain_number(numbers.max())}"
        raise DataError(problem, column=column, fix="give a number in this range")
    return choice


def _by_count(array: pa.Array) -> list[Any]:
    """The distinct values by falling count, then by value."""
    counts = array.value_counts()
    pairs = zip(counts.field("counts").to_pylist(), counts.field("values").to_pylist(), strict=True)
    return [value for _, value in sorted(pairs, key=lambda pair: (-pair[0], pair[1]))]


def _refuse_one_value(values: Sequence[Any], column: str) -> None:
    if len(values) == 1:
        problem = f"the label is {values[0]!r} in all inspected rows, so nothing can be learned from it"
        raise DataError(problem, column=column, fix="choose another column, or add rows with other values")


def _shown(values: Sequence[Any]) -> str:
    return ", ".join(map(repr, values[:_VALUES_SHOWN])) + (", …" if len(values) > _VALUES_SHOWN else "")
