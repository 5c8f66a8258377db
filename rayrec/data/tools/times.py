"""The times of an interaction log: which columns hold times, and how texts become times.

A time is a timestamp, a date, or a finite number. The order of a log decides what a history may hold, so a column that
may be ordered otherwise than time, e.g. a text like 11/9/2019, is never ordered as it stands: it is parsed or refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, is_text, without_views
from rayrec.data.arrays.buffers import I64, Mask
from rayrec.data.mapping.problems import Source
from rayrec.data.source.filters import Condition
from rayrec.storage.errors import DataError, first_line

# Of the locale's directives (%c, %x, %X) and of %Z (Python ignores most zone names) the result differs by machine.
_DIRECTIVES = "aAbBdfGHIjmMpSuUVwWyYz%"
_WHOLE = r"^-?\d+$"
_NUMBER = r"^-?\d+(\.\d+)?$"
_SET_FORMAT = "--time '{column}=FORMAT', e.g. '{column}=%m/%d/%Y %I:%M:%S %p' (Python's strptime)"


@dataclass(frozen=True, slots=True)
class TimeColumn:
    """A column of times.

    Args:
        column: its name.
        format: how Python's `datetime.strptime` reads its texts or whole numbers. Default: texts are ISO 8601
            (`2024-01-31`, `2024-01-31 08:05:00.5`, `2024-01-31T08:05Z`; all with a zone, or none), or numbers if all
            are digits.

    Raises:
        ValueError: a format that `strptime` does not know, or by which it would read other times than were written.
    """

    column: str
    format: str | None = None

    def __post_init__(self) -> None:
        if self.format is None:
            return
        has = set(re.findall(r"%(.?)", self.format))
        problem = None
        if unknown := sorted(has - set(_DIRECTIVES)):
            problem = f"%{unknown[0]} is not supported; use %z for a zone, and %{' %'.join(_DIRECTIVES[:-1])}"
        elif not has - {"%"}:
            problem = "it has no directive of strptime like %Y; write e.g. %d/%m/%Y"
        elif ("I" in has) != ("p" in has):
            problem = "hours from 1 to 12 (%I) and AM or PM (%p) need each other; hours from 0 to 23 are %H"
        elif has & set("UW") and not has & set("aAuw"):
            problem = "strptime ignores a number of a week (%U, %W) without a day of the week; add %w"
        if problem is not None:
            raise ValueError(f"the format {self.format!r} of the time {self.column!r}: {problem}")

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parses `COLUMN` or `COLUMN=FORMAT`. Raises as the class."""
        column, equals, written = text.partition("=")
        return cls(column, written if equals else None)

    @property
    def has_year(self) -> bool:
        """False if the format reads no year, so that its order begins anew each year or day."""
        return self.format is None or re.search("%[YyG]", self.format.replace("%%", "")) is not None


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
                value: int | float | str = _reader(self.column.format)(str(moment)).isoformat()
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
        return repr(value.as_py().strftime(self.column.format))


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
        DataError: a null, a type that is no time, a value that does not parse, or an infinite number.
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


class _BadText(ValueError):
    """A text that does not parse.

    Args:
        position: its position among the texts.
        problem: what it is not.
    """

    def __init__(self, position: int, problem: str) -> None:
        super().__init__(problem)
        self.position, self.problem = position, problem


def _parsed(column: TimeColumn, array: pa.Array, source: Source) -> pa.Array:
    """Parses each distinct value once."""
    name = column.column
    try:
        encoded = pc.dictionary_encode(array if pat.is_integer(array.type) else array.cast(pa.large_string()))
    except pa.ArrowInvalid as error:
        raise DataError(f"the times are not UTF-8: {first_line(error)}", column=name, fix="write texts") from error
    texts = encoded.dictionary.cast(pa.large_string())
    try:
        if column.format is not None:
            parsed = _by_format(texts, column.format, padded=pat.is_integer(array.type))
        elif len(texts) and re.search(_NUMBER, texts[0].as_py()):
            parsed = _numbers(texts)
        else:
            parsed = _iso(texts)
    except _BadText as error:
        row = pc.index(encoded.indices, error.position).as_py()
        raise DataError(
            error.problem,
            column=name,
            value=repr(texts[error.position].as_py()),
            fix="correct the value, or give the format of the times: " + _SET_FORMAT.format(column=name),
        ).at(*source.locate(row)) from error
    return parsed.take(encoded.indices)


def _by_format(texts: pa.Array, written: str, *, padded: bool) -> pa.Array:
    """Timestamps of texts in a format.

    Args:
        padded: the texts were numbers, which have lost their leading zeros.
    """
    read = _reader(written)
    width = len(datetime(2000, 12, 31, 23, 59, 59).strftime(written)) if padded else 0
    moments = []
    for position, text in enumerate(texts.to_pylist()):
        try:
            moments.append(read(text.zfill(width)))
        except ValueError:
            raise _BadText(position, f"the time does not have the format {written!r}") from None
    return pa.array(moments, pa.timestamp("us", "UTC" if "z" in re.findall("%(.)", written) else None))


def _reader(written: str) -> Callable[[str], datetime]:
    """Reads a text in a format; raises ValueError for any other text."""
    # strptime reads 1122019 by %d%m%Y as 11 February: without marks between them, numbers must have all digits. Digits
    # of a second (%f) at the end may be fewer than six.
    adjacent = re.search(r"%[dfGHIjmMSUVWyY]%[dfGHIjmMSUVWyY]", written) is not None
    optional = "0" if written.endswith("%f") else ""

    def read(text: str) -> datetime:
        moment = datetime.strptime(text, written)
        if adjacent and moment.strftime(written).rstrip(optional) != text.rstrip(optional):
            raise ValueError(f"{text!r} lacks digits of {written!r}")
        return moment if moment.tzinfo is None else moment.astimezone(UTC)

    return read


def _numbers(texts: pa.Array) -> pa.Array:
    is_number_text = pc.match_substring_regex(texts, _NUMBER).to_numpy(zero_copy_only=False)
    if not is_number_text.all():
        raise _BadText(int(is_number_text.argmin()), "the time is not a number, as the first time is")
    whole = pc.all(pc.match_substring_regex(texts, _WHOLE)).as_py()
    kind = pa.int64() if whole else pa.float64()
    if (position := _first_bad(texts, kind)) is not None:
        raise _BadText(position, f"the time does not fit {kind}")
    return texts.cast(kind)


def _number(text: str) -> int | float:
    """Raises ValueError for what is not a finite number."""
    if re.search(_WHOLE, text):
        return int(text)
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is not finite")
    return number


# Microseconds hold every year, nanoseconds nine digits of a second.
_ISO = [pa.timestamp(unit, zone) for zone in (None, "UTC") for unit in ("us", "ns")]


def _iso(texts: pa.Array) -> pa.Array:
    """Timestamps of ISO 8601 texts that all have a zone, or none."""
    first_bad = {kind: _first_bad(texts, kind) for kind in _ISO}
    for kind, position in first_bad.items():
        if position is None:
            return texts.cast(kind)
    position = max(bad for bad in first_bad.values() if bad is not None)
    alone = texts.slice(position, 1)
    problem = "the time is a text that is not a date or time of ISO 8601"
    if any(_first_bad(alone, kind) is None for kind in _ISO):
        problem = "the times have a zone in some rows only, or digits of seconds that do not fit 64 bits"
    raise _BadText(position, problem)


def _first_bad(texts: pa.Array, kind: pa.DataType) -> int | None:
    """The position of the first text that cannot be cast; None if all can."""

    def casts(start: int, stop: int) -> bool:
        try:
            texts.slice(start, stop - start).cast(kind)
        except pa.ArrowInvalid:
            return False
        return True

    if casts(0, len(texts)):
        return None
    low, high = 0, len(texts)  # the first one lies in [low, high)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if casts(low, middle) else (low, middle)
    return low


def combined_rank(times: list[Times]) -> I64:
    """The rank of each row by the first column, then the second, and so on; equal times have equal ranks."""
    rank = np.zeros(len(times[0].values), np.int64)
    for column in times:
        of_column = pc.rank(column.values, tiebreaker="dense").to_numpy().astype(np.int64)
        rank = np.unique(rank * (of_column.max(initial=0) + 1) + of_column, return_inverse=True)[1].astype(np.int64)
    return rank
