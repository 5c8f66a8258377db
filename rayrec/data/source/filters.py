"""Conditions that rows must meet to be read: `["day", ">=", "2024-01-01"]`, on columns or on partitions.

A row group that no row can pass by its statistics is left out when the manifest is made, as are files by their folders.
A null passes no condition.
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
from rayrec.data.mapping.column_types import column_missing
from rayrec.storage.errors import DataError

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
        values: what is compared with; more than one for `in` and `not in` only.
    """

    column: str
    op: str
    values: tuple[Value, ...]

    @classmethod
    def parse(cls, given: Any) -> Condition:
        """The condition that a config's `[column, operator, value]` means.

        Raises:
            ValueError: it has another form, an unknown operator, or a value that nothing can be compared with.
        """
        if not isinstance(given, list | tuple) or len(given) != 3 or not isinstance(given[0], str):
            hint = "; conditions are joined by and, alternatives of one column are written with in"
            raise ValueError(f"{given!r} is not a condition; {_FORM}{hint}")
        column, op, value = given
        if op not in OPERATORS:
            raise ValueError(f"{op!r} in {list(given)} is not an operator; allowed: {', '.join(OPERATORS)}")
        several = op in ("in", "not in")
        if several != isinstance(value, list | tuple | set | frozenset):
            raise ValueError(f"{list(given)}: {op!r} needs {'a list of values' if several else 'one value'}")
        values = tuple(_value(one, given) for one in (value if several else [value]))
        if not values:
            raise ValueError(f"{list(given)}: the list is empty, so that no row could be left out or kept by it")
        return cls(column, op, values)

    def to_list(self) -> list[Any]:
        """What `parse` reads."""
        return [self.column, self.op, list(self.values) if self.op in ("in", "not in") else self.values[0]]

    def __str__(self) -> str:
        return f"{self.column} {self.op} {self.to_list()[2]!r}"

    def check_in(self, found: pa.Schema, file: str) -> None:
        """That a file has the column, of a type that can be compared with the values.

        Raises:
            DataError: it has not.
        """
        if self.column not in found.names:
            raise column_missing(self.column, found, file, "correct the column's name in the filter")
        self.check(found.field(self.column).type, file)

    def check(self, kind: pa.DataType, file: str) -> None:
        """That a column of this type can be compared with the values.

        Raises:
            DataError: it cannot.
        """
        try:
            self._operands(plain_type(kind))
        except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
            raise DataError(
                f"the filter `{self}` does not fit the column's type {kind}: {error}",
                file=file,
                column=self.column,
                fix="compare texts with texts, numbers with numbers, dates and times with texts as 2024-01-31",
            ) from error

    def holds(self, column: pa.Array | pa.ChunkedArray) -> Mask:
        """For every row whether it passes."""
        plain = plain_type(column.type)
        column = column if plain == column.type else column.cast(plain)
        operands = self._operands(plain)
        if self.op in COMPARE:
            found = COMPARE[self.op](column, operands[0])
        else:
            values = [operand.as_py() for operand in operands]
            if 0.0 in values and pat.is_floating(plain):
                values += [0.0, -0.0]  # equal, but not to is_in
            found = pc.is_in(column, value_set=pa.array(values, plain))
            found = found if self.op == "in" else pc.and_(pc.invert(found), column.is_valid())
        return _numpy(found.fill_null(False))

    def may_hold(self, low: pa.Array, high: pa.Array) -> Mask:
        """For row groups with these smallest and largest values (null: unknown), whether a row may pass."""
        if self.op in ("!=", "not in"):
            return np.ones(len(low), dtype=np.bool_)
        return reduce(np.logical_or, [self._within(operand, low, high) for operand in self._operands(low.type)])

    def _within(self, operand: pa.Scalar, low: pa.Array, high: pa.Array) -> Mask:
        if self.op in ("<", "<="):
            found = COMPARE[self.op](low, operand)
        elif self.op in (">", ">="):
            found = COMPARE[self.op](high, operand)
        else:
            found = pc.and_(pc.less_equal(low, operand), pc.greater_equal(high, operand))
        return _numpy(found.fill_null(True))

    def _operands(self, kind: pa.DataType) -> list[pa.Scalar]:
        return [_operand(value, kind, exact=self.op not in COMPARE) for value in self.values]


def parse_all(given: Iterable[Any]) -> tuple[Condition, ...]:
    """All conditions of a config's list; `Condition`s are taken as they are.

    Raises:
        ValueError: one of them is none.
    """
    return tuple(one if isinstance(one, Condition) else Condition.parse(one) for one in given)


def rows_that_pass(table: pa.Table, conditions: Sequence[Condition]) -> Mask:
    """For every row of a table whether it meets all conditions."""
    mask = np.ones(table.num_rows, dtype=np.bool_)
    for condition in conditions:
        mask &= condition.holds(table.column(condition.column))
    return mask


def only_passing(table: pa.Table, conditions: Sequence[Condition], file: str) -> pa.Table:
    """The rows of a file's table that meet all conditions, of types that Arrow computes with.

    Raises:
        DataError: it lacks a column, or has it in a type that cannot be compared.
    """
    for condition in conditions:
        condition.check_in(table.schema, file)
    table = table.cast(pa.schema([field.with_type(without_views(field.type)) for field in table.schema]))
    return table.filter(pa.array(rows_that_pass(table, conditions))) if conditions else table


def _value(value: Any, given: Any) -> Value:
    if isinstance(value, date):  # and datetime: YAML reads 2024-01-01 as a date
        return value.isoformat()
    if not isinstance(value, bool | int | float | str) or (isinstance(value, float) and math.isnan(value)):
        raise ValueError(f"{list(given)}: {value!r} is not a text, number or boolean that can be compared with")
    return value


def _operand(value: Value, kind: pa.DataType, exact: bool) -> pa.Scalar:
    """The value as a scalar that a column of this type can be compared with."""
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
        whole = isinstance(value, int) or float(value).is_integer()
        if whole and (exact or _fits(int(value), kind)):
            return pa.scalar(int(value), kind)
        if not exact:  # halfway between the whole numbers beside it; Arrow compares none beyond 2**53 with a float
            most = Decimal(1 << 64)
            floor = math.floor(min(max(Decimal(value), -most), most))
            return pa.scalar(Decimal(2 * floor + 1) / 2)
    raise TypeError(f"{value!r} cannot be compared with it")


def _fits(value: int, kind: pa.DataType) -> bool:
    bits = kind.bit_width - pat.is_signed_integer(kind)
    return (-(1 << bits) if pat.is_signed_integer(kind) else 0) <= value < 1 << bits


def _moment(text: str, kind: pa.DataType) -> pa.Scalar:
    """A date or time; without a zone it is taken as UTC where the column has one."""
    try:
        return pa.scalar(text).cast(kind)
    except pa.ArrowInvalid:
        if not pat.is_timestamp(kind) or kind.tz is None:
            raise
        return pa.scalar(text).cast(pa.timestamp(kind.unit)).cast(kind)


def plain_type(kind: pa.DataType) -> pa.DataType:
    """The type that values of this one are compared in."""
    return without_views(kind.value_type if pat.is_dictionary(kind) else kind)


def _numpy(mask: pa.Array | pa.ChunkedArray) -> Mask:
    found: Mask = mask.to_numpy() if isinstance(mask, pa.ChunkedArray) else mask.to_numpy(zero_copy_only=False)
    return found.astype(np.bool_)
