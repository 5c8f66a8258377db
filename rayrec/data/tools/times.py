"""The times of an interaction log: which columns hold times, and how texts become times.

A time is a timestamp, a date, or a finite number. The order of a log decides what a history may hold, so a column that
may be ordered otherwise than time, e.g. a text like 11/9/2019, is never ordered as text: it is parsed or refused.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, is_text, without_views
from rayrec.data.arrays.buffers import I64, Mask
from rayrec.data.arrays.times import ISO, cast_or_null, check_format, has_year, parse_times, write_time
from rayrec.data.formats.text_cells import NUMBER
from rayrec.data.mapping.problems import Source
from rayrec.data.source.filters import Condition
from rayrec.storage.errors import DataError, first_line

_WHOLE = r"^-?[0-9]+$"
_NUMBER = r"^-?[0-9]+(\.[0-9]+)?$"
_SET_FORMAT = "--time '{column}=FORMAT', e.g. '{column}=%m/%d/%Y %I:%M:%S %p' (Python's strptime)"


@dataclass(frozen=True, slots=True)
class TimeColumn:
    """A column of times.

    Args:
        column: its name.
        format: how its texts or whole numbers are read; see `rayrec.data.arrays.times`. Default: texts are ISO 8601, or
            numbers if all are digits.

    Raises:
        ValueError: a format that `strptime` does not know, or by which it would read other times than were written.
    """

    column: str
    format: str | None = None

    def __post_init__(self) -> None:
        if self.format is None:
            return
        try:
            check_format(self.format)
        except ValueError as error:
            raise ValueError(f"the format {self.format!r} of the time {self.column!r}: {error}") from None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `COLUMN` or `COLUMN=FORMAT`. Raises as the class."""
        column, equals, written = text.partition("=")
        return cls(column, written if equals else None)

    @property
    def has_year(self) -> bool:
        """False if the format reads no year, so that its order starts again each year or day."""
        return self.format is None or has_year(self.format)


@dataclass(frozen=True, slots=True)
class Times:
    """The times of some rows.

    Args:
        column: where they come from.
        values: timestamps, dates, times of day or finite numbers; none is null.
    """

    column: TimeColumn
    values: pa.Array

    def take(self, rows: I64) -> Times:
        return Times(self.column, self.values.take(pa.array(rows)))

    def from_on(self, moment: int | float | str) -> Mask:
        """True for the rows from a moment on, which is read as the column's values are.

        Raises:
            DataError: the moment cannot be read so.
        """
        kind = self.values.type
        try:
            if self.column.format is not None:
                time = parse_times(pa.array([str(moment)]), self.column.format)[0]
                if not time.is_valid:
                    raise ValueError(f"not a time in the format {self.column.format!r}")
                value: int | float | str = str(time)
            else:
                value = _number(str(moment)) if is_number(kind) else str(moment)
            condition = Condition(self.column.column, ">=", (value,))
            condition.check(kind, "")
        except ValueError as error:
            written = f"as {self.column.format!r}" if self.column.format is not None else f"like its type {kind}"
            raise DataError(
                f"the split's time {str(moment)!r} is not a time of the column",
                column=self.column.column,
                fix=f"write it {written}, e.g. {self._example()}",
            ) from error
        return condition.holds(self.values)

    def _example(self) -> str:
        """The first time, as a split would write it."""
        if not len(self.values):
            return "the first time of the test"
        value = self.values[0]
        if self.column.format is None:
            return str(value)
        return repr(write_time(value, self.column.format))


def is_number(kind: pa.DataType) -> bool:
    """True for integers, floats and decimals."""
    return bool(pat.is_integer(kind) or pat.is_floating(kind) or pat.is_decimal(kind))


def without_nulls(array: pa.Array, column: str, role: str, source: Source) -> pa.Array:
    """The array, decoded. A NaN is a null: it has no place in an order.

    Raises:
        DataError: a null; names the first row.
    """
    array = decoded(array.cast(without_views(array.type)))
    nulls = pc.is_null(array, nan_is_null=pat.is_floating(array.type)).to_numpy(zero_copy_only=False)
    if nulls.any():
        count = int(nulls.sum())
        raise DataError(
            f"the {role} is null or NaN in {count:,} of {len(array):,} rows; this is the first",
            column=column,
            fix="remove these rows",
        ).at(*source.locate(int(nulls.argmax())))
    return array


def read_times(column: TimeColumn, array: pa.Array, source: Source, *, first: bool) -> Times:
    """Reads a column of times. Texts, and whole numbers with a format, become timestamps or numbers.

    Args:
        source: locates the rows in files.
        first: False for a column that orders rows of equal time by an earlier column; it may be a time of day.

    Raises:
        DataError: a null, a type other than times, a value that does not parse, or an infinite number.
    """
    name = column.column
    array = without_nulls(array, name, "time", source)
    kind = array.type
    if first and not column.has_year:
        raise DataError(
            f"the format {column.format!r} has no year, so that it does not order by time",
            column=name,
            fix="give the column of the year or day first: --time day --time clock=%H:%M",
        )
    if is_text(kind) or (column.format is not None and pat.is_integer(kind)):
        return Times(column, _parsed(column, array, source))
    if column.format is not None:
        raise DataError(f"a format reads texts or whole numbers, not {kind}", column=name, fix=f"--time {name}")
    if pat.is_floating(kind):
        finite = pc.is_finite(array).to_numpy(zero_copy_only=False)
        if not finite.all():
            at = source.locate(int(finite.argmin()))
            raise DataError("the time is not a finite number", column=name, fix="remove the row").at(*at)
        array = array.cast(pa.float64())  # Arrow does not order float16
    elif not (is_number(kind) or pat.is_timestamp(kind) or pat.is_date(kind) or (pat.is_time(kind) and not first)):
        fix = "name a column of times"
        if pat.is_time(kind):
            fix = f"give the column of the day first: --time DAY --time {name}"
        raise DataError(f"a time is a timestamp, a date or a number, not {kind}", column=name, fix=fix)
    return Times(column, array)


def _parsed(column: TimeColumn, array: pa.Array, source: Source) -> pa.Array:
    """Timestamps, or numbers."""
    name, time_format = column.column, column.format
    if is_text(array.type):
        try:
            array = array.cast(pa.large_string())
        except pa.ArrowInvalid as error:
            problem = f"the times are not UTF-8: {first_line(error)}"
            raise DataError(problem, column=name, fix="write texts") from error
    if time_format is not None:
        parsed, problem = parse_times(array, time_format), f"the time does not have the format {time_format!r}"
    elif len(array) and re.fullmatch(_NUMBER, array[0].as_py()):
        parsed, problem = _numbers(array), "the time is not a number of 64 bits, as the first time is"
    else:
        parsed, problem = parse_times(array, ISO), "the time is a text that is not a date or time of ISO 8601"
    if parsed.null_count:
        row = pc.index(parsed.is_null(), True).as_py()
        if time_format is None and parse_times(array.slice(row, 1), ISO).null_count == 0:
            problem = "the times have a zone in some rows only, or digits of seconds that do not fit 64 bits"
        raise DataError(
            problem,
            column=name,
            value=repr(str(array[row])),
            fix="correct the value, or give the format of the times: " + _SET_FORMAT.format(column=name),
        ).at(*source.locate(row))
    return parsed


def _numbers(texts: pa.Array) -> pa.Array:
    """Integers, or floats if some have a fraction; null for other texts."""
    texts = pc.if_else(pc.match_substring_regex(texts, _NUMBER), texts, None)
    whole = pc.all(pc.match_substring_regex(texts, _WHOLE)).as_py()
    if not whole:
        return texts.cast(pa.float64())
    return cast_or_null(texts, pa.int64())


def _number(text: str) -> int | float:
    """Raises ValueError for other texts."""
    if not re.fullmatch(NUMBER, text):
        raise ValueError(f"{text!r} is not a number")
    return int(text) if re.fullmatch(_WHOLE, text) else float(text)


def combined_rank(times: list[Times]) -> I64:
    """The rank of each row by the first column, then the second, and so on; equal times have equal ranks."""
    rank = np.zeros(len(times[0].values), np.int64)
    for column in times:
        of_column = pc.rank(column.values, tiebreaker="dense").to_numpy().astype(np.int64)
        rank = np.unique(rank * (of_column.max(initial=0) + 1) + of_column, return_inverse=True)[1].astype(np.int64)
    return rank
