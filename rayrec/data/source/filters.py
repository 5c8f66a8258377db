"""Filters of rows: conditions on columns or partitions, for example `["day", ">=", "2024-01-01"]`. Nulls never match.

The manifest excludes files by their partitions, and row groups by their statistics.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import is_text, without_views
from rayrec.data.arrays.buffers import Mask
from rayrec.data.source.row_share import ROW_SHARE, row_shares
from rayrec.storage.column_names import column_missing
from rayrec.storage.errors import DataError
from rayrec.storage.files import Found

Value = bool | int | float | str

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "=": pc.equal,
    "==": pc.equal,
    "!=": pc.not_equal,
    "<": pc.less,
    "<=": pc.less_equal,
    ">": pc.greater,
    ">=": pc.greater_equal,
}
OPERATORS = (*COMPARE, "in", "not in")
_FORM = 'write it as [column, operator, value], e.g. ["day", ">=", "2024-01-01"]'


@dataclass(frozen=True, slots=True)
class Condition:
    """One condition on one column.

    Args:
        op: one of `OPERATORS`.
        values: the operands; more than one for `in` and `not in` only.
    """

    column: str
    op: str
    values: tuple[Value, ...]

    @classmethod
    def parse(cls, condition: Any) -> Condition:
        """Parses `[column, operator, value]` of a config.

        Raises:
            ValueError: another form, an unknown operator, or an unsupported value.
        """
        if not isinstance(condition, list | tuple) or len(condition) != 3 or not isinstance(condition[0], str):
            hint = "; conditions are joined by `and`; use `in` for alternative values of a column"
            raise ValueError(f"{condition!r} is not a condition; {_FORM}{hint}")
        column, op, value = condition
        if op not in OPERATORS:
            raise ValueError(f"{op!r} in {list(condition)} is not an operator; allowed: {', '.join(OPERATORS)}")
        takes_list = op in ("in", "not in")
        if takes_list != isinstance(value, list | tuple | set | frozenset):
            raise ValueError(f"{list(condition)}: {op!r} needs {'a list of values' if takes_list else 'one value'}")
        values = tuple(_value(operand, condition) for operand in (value if takes_list else [value]))
        if not values:
            raise ValueError(f"{list(condition)}: the list of values is empty")
        return cls(column, op, values)

    def to_list(self) -> list[Any]:
        """The list that `parse` reads."""
        return [self.column, self.op, list(self.values) if self.op in ("in", "not in") else self.values[0]]

    def __str__(self) -> str:
        return f"{self.column} {self.op} {self.to_list()[2]!r}"

    def check_in(self, arrow: pa.Schema, file: str) -> None:
        """Checks that a file has the column, with a type that compares with the values.

        Raises:
            DataError: the column is missing, or its type does not compare.
        """
        if self.column not in arrow.names:
            raise column_missing(self.column, arrow, file, "correct the column's name in the filter")
        self.check(arrow.field(self.column).type, file)

    def check(self, kind: pa.DataType, file: str) -> None:
        """Checks that a column of this type compares with the values.

        Raises:
            DataError: it does not.
        """
        if pat.is_null(kind):  # all values are null, which never match
            return
        try:
            self._operands(compared_type(kind))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"the filter `{self}` does not fit the column's type {kind}: {error}",
                file=file,
                column=self.column,
                fix="compare texts with texts, numbers with numbers, dates and times with texts like 2024-01-31",
            ) from error

    def holds(self, column: pa.Array | pa.ChunkedArray) -> Mask:
        """True for every matching row."""
        compared = compared_type(column.type)
        if pat.is_null(compared):
            return np.zeros(len(column), np.bool_)
        column = column if compared == column.type else column.cast(compared)
        operands = self._operands(compared)
        if self.op in COMPARE:
            mask = COMPARE[self.op](column, operands[0])
        else:
            values = [operand.as_py() for operand in operands]
            if 0.0 in values and pat.is_floating(compared):
                values += [0.0, -0.0]  # is_in distinguishes them
            mask = pc.is_in(column, value_set=pa.array(values, compared))
            mask = mask if self.op == "in" else pc.and_(pc.invert(mask), column.is_valid())
        return _numpy(mask.fill_null(False))

    def may_hold(self, low: pa.Array, high: pa.Array) -> Mask:
        """True for row groups with these minima and maxima (null: unknown) in which a row may match."""
        if self.op in ("!=", "not in"):
            return np.ones(len(low), dtype=np.bool_)
        return reduce(np.logical_or, [self._within(operand, low, high) for operand in self._operands(low.type)])

    def _within(self, operand: pa.Scalar, low: pa.Array, high: pa.Array) -> Mask:
        if self.op in ("<", "<="):
            mask = COMPARE[self.op](low, operand)
        elif self.op in (">", ">="):
            mask = COMPARE[self.op](high, operand)
        else:
            mask = pc.and_(pc.less_equal(low, operand), pc.greater_equal(high, operand))
        return _numpy(mask.fill_null(True))

    def _operands(self, kind: pa.DataType) -> list[pa.Scalar]:
        return [_operand(value, kind, exact=self.op not in COMPARE) for value in self.values]


def parse_all(conditions: Iterable[Any]) -> tuple[Condition, ...]:
    """Parses a list of conditions; `Condition` objects pass unchanged.

    Raises:
        ValueError: as `Condition.parse`.
    """
    return tuple(
        condition if isinstance(condition, Condition) else Condition.parse(condition) for condition in conditions
    )


def rows_that_pass(table: pa.Table, conditions: Sequence[Condition]) -> Mask:
    """True for every row of a table that meets all conditions."""
    mask = np.ones(table.num_rows, dtype=np.bool_)
    for condition in conditions:
        mask &= condition.holds(table.column(condition.column))
    return mask


def only_passing(table: pa.Table, conditions: Sequence[Condition], file: Found, first_row: int) -> pa.Table:
    """The rows of a table that match all conditions, in types that Arrow's compute functions accept.

    Args:
        first_row: number of the table's first row in the file.

    Raises:
        DataError: a column is missing, or its type cannot be compared.
    """
    columns = table.column_names
    if ROW_SHARE not in columns and any(condition.column == ROW_SHARE for condition in conditions):
        rows = np.arange(first_row, first_row + table.num_rows)
        table = table.append_column(ROW_SHARE, row_shares(file.uri, file.size_bytes, rows))
    for condition in conditions:
        condition.check_in(table.schema, file.uri)
    table = table.cast(pa.schema([field.with_type(without_views(field.type)) for field in table.schema]))
    return table.filter(pa.array(rows_that_pass(table, conditions))).select(columns) if conditions else table


def _value(value: Any, condition: Any) -> Value:
    if isinstance(value, date):  # or a datetime: YAML parses 2024-01-01 as a date
        return value.isoformat()
    if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and math.isnan(value)):
        raise ValueError(f"{list(condition)}: {value!r} is not a text, number or boolean")
    return value


def _operand(value: Value, kind: pa.DataType, exact: bool) -> pa.Scalar:
    """Converts a value to a scalar that compares with a column of this type."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_text(kind) and isinstance(value, str):
        return pa.scalar(value).cast(kind)
    if pat.is_boolean(kind) and isinstance(value, bool):
        return pa.scalar(value)
    if pat.is_temporal(kind) and isinstance(value, str):
        return _moment(value, kind)
    if pat.is_decimal(kind) and number:
        return pa.scalar(Decimal(str(value)), kind if exact else None)
    if pat.is_floating(kind) and number:
        return pa.scalar(float(value)).cast(kind, safe=False)
    if pat.is_integer(kind) and number:
        is_whole = isinstance(value, int) or float(value).is_integer()
        if is_whole and (exact or _fits(int(value), kind)):
            return pa.scalar(int(value), kind)
        if not exact:  # a decimal between two integers: Arrow does not compare int64 beyond 2**53 with floats
            limit = Decimal(1 << 64)
            floor = math.floor(min(max(Decimal(value), -limit), limit))
            return pa.scalar(Decimal(2 * floor + 1) / 2)
    raise TypeError(f"{value!r} cannot be compared with it")


def _fits(value: int, kind: pa.DataType) -> bool:
    bits = kind.bit_width - pat.is_signed_integer(kind)
    return (-(1 << bits) if pat.is_signed_integer(kind) else 0) <= value < 1 << bits


def _moment(text: str, kind: pa.DataType) -> pa.Scalar:
    """A date or time. A text without a zone is UTC if the column has a zone."""
    try:
        return pa.scalar(text).cast(kind)
    except pa.ArrowInvalid:
        if not pat.is_timestamp(kind) or kind.tz is None:
            raise
        return pa.scalar(text).cast(pa.timestamp(kind.unit)).cast(kind)


def compared_type(kind: pa.DataType) -> pa.DataType:
    """The type in which values of this type are compared."""
    return without_views(kind.value_type if pat.is_dictionary(kind) else kind)


def _numpy(column: pa.Array | pa.ChunkedArray) -> Mask:
    array: Mask = column.to_numpy() if isinstance(column, pa.ChunkedArray) else column.to_numpy(zero_copy_only=False)
    return array.astype(np.bool_)
