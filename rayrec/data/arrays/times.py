"""The formats of times in texts and numbers, and their conversion to timestamps.

| format | values |
|---|---|
| `s`, `ms`, `us`, `ns` | numbers, or texts of digits: the time since 1970, before 2200 |
| `yyyymmdd`, `yyyymmddhh`, `yyyymmddhhmm`, `yyyymmddhhmmss`, `yymmddhh` | 20141001, 14102123: whole numbers or texts |
| `excel` | 45261.5: the days since the end of 1899, as spreadsheets store times |
| `iso` | texts of ISO 8601: `2024-01-31`, `2024-01-31 08:05:00.5`, `2024-01-31T08:05Z`, `2024-01-31 08:05:00 UTC` |
| e.g. `%m/%d/%Y %I:%M:%S %p` | texts in a format of Python's `datetime.strptime`, or whole numbers of these digits |

The texts of a column have a zone (then their timestamps are UTC), or none. Spaces around a text are ignored. 24:00 is
the beginning of the next day, and a leap second (23:59:60) the second after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import LATEST_S, UNITS, decoded, is_text, plain_numbers, seconds_of
from rayrec.data.arrays.buffers import I64

ISO, EXCEL = "iso", "excel"
# Digits of a date: the parts and their numbers of digits, first to last.
DIGITS = {
    "yyyymmdd": (4, 2, 2),
    "yyyymmddhh": (4, 2, 2, 2),
    "yyyymmddhhmm": (4, 2, 2, 2, 2),
    "yyyymmddhhmmss": (4, 2, 2, 2, 2, 2),
    "yymmddhh": (2, 2, 2, 2),
}
USAGE = f"{', '.join(UNITS)}, {', '.join(DIGITS)}, {EXCEL}, {ISO}, or a format of strptime such as '%d.%m.%Y %H:%M'"

# Of the locale's directives (%c, %x, %X) and of %Z (Python ignores most zone names) the result differs by machine.
_DIRECTIVES = "aAbBdfGHIjmMpSuUVwWyYz%"
# Directives of C's strptime that Python lacks, and their meaning.
_OF_C = {"D": "%m/%d/%y", "F": "%Y-%m-%d", "R": "%H:%M", "T": "%H:%M:%S", "e": "%d", "h": "%b", "n": " ", "t": " "}
# 1970-01-01 as spreadsheets count days.
_EXCEL_1970, _DAY_MS = 25_569, 86_400_000
_NUMBER = r"^[0-9]{1,19}(\.[0-9]+)?$"
_ISO = r"^\d{4}-\d\d-\d\d([ T]\d\d(:\d\d(:\d\d(\.\d{1,9})?)?)?(Z|[-+]\d\d(:?\d\d)?)?)?$"
_ISO_ZONE = r"[ T].*(Z|[-+]\d\d(:?\d\d)?)$"
_NANOSECONDS = r"\.\d{7}"


def check_format(time_format: str) -> None:
    """Checks that a format is known.

    Raises:
        ValueError: a format that is unknown, or by which `strptime` would read other times than were written.
    """
    if time_format in (*UNITS, *DIGITS, EXCEL, ISO):
        return
    has = _directives(time_format)
    problem = None
    if unknown := sorted(has - set(_DIRECTIVES)):
        problem = f"%{unknown[0]} is not supported; use %z for a zone, and %{' %'.join(_DIRECTIVES[:-1])}"
    elif not has - {"%"}:
        problem = f"it has no directive of strptime like %Y; use {USAGE}"
    elif ("I" in has) != ("p" in has):
        problem = "hours from 1 to 12 (%I) and AM or PM (%p) need each other; hours from 0 to 23 are %H"
    elif has & set("UW") and not has & set("aAuw"):
        problem = "strptime ignores a number of a week (%U, %W) without a day of the week; add %w"
    if problem is not None:
        raise ValueError(problem)


def has_year(time_format: str) -> bool:
    """False if the format has no year, so that its order starts again each year or day."""
    return "%" not in time_format or bool(_directives(time_format) & set("YyG"))


def parse_times(values: pa.Array, time_format: str) -> pa.Array:
    """Timestamps of texts or numbers.

    Args:
        values: [n], texts or numbers.
        time_format: as `check_format` accepts it.

    Returns:
        [n], timestamps; their zone is UTC if the texts have one. Null for nulls, and for values that do not have the
        format. Where some texts of ISO 8601 have a zone and others have none, the first text decides which are null.
    """
    values = decoded(values)
    if time_format in UNITS:
        return _since_1970(values, time_format)
    if time_format in DIGITS:
        seconds = _seconds_of_digits(values, DIGITS[time_format])
        return pa.array(seconds.astype("datetime64[s]"), mask=seconds < 0)
    if time_format == EXCEL:
        return _of_excel(values)
    padded = pat.is_integer(values.type)
    if not padded and not is_text(values.type):
        return pa.nulls(len(values), pa.timestamp("us"))
    texts, time_format = _trimmed(values), _of_python(time_format)
    later = None
    if time_format == ISO or "%H:%M" in time_format:
        texts, later = _within_the_day(texts)
    times = _iso(texts) if time_format == ISO else _by_strptime(texts, time_format, padded=padded)
    return times if later is None else pc.add(times, later.cast(pa.duration(times.type.unit)))


def write_time(time: pa.Scalar, time_format: str) -> str:
    """The text in a format, for a timestamp that `parse_times` returns."""
    if time_format in UNITS:
        return str(time.cast(pa.timestamp(time_format)).value)
    if time_format == ISO:
        return str(time)
    if time_format == EXCEL:
        return str(_EXCEL_1970 + time.cast(pa.timestamp("ms", time.type.tz), safe=False).value / _DAY_MS)
    moment = time.cast(pa.timestamp("us", time.type.tz)).as_py()
    if time_format in DIGITS:
        time_format = "%y%m%d%H" if time_format == "yymmddhh" else "%Y%m%d%H%M%S"[: 2 * len(DIGITS[time_format])]
    return str(moment.strftime(_of_python(time_format)))


def row_seconds(values: pa.Array, time_format: str) -> I64:
    """[n], seconds since 1970 of the times of rows, rounded down; -1 for values that do not have the format, or lie
    outside 1970 to 2200."""
    seconds = seconds_of(parse_times(values, time_format), "s")
    return np.where((seconds >= 0) & (seconds < LATEST_S), seconds, -1)


def _directives(time_format: str) -> set[str]:
    return set(re.findall(r"%(.?)", _of_python(time_format)))


def _of_python(time_format: str) -> str:
    return re.sub("%(.)", lambda found: _OF_C.get(found[1], found[0]), time_format)


def _trimmed(values: pa.Array) -> pa.Array:
    """Texts without spaces around them; null for bytes that are not UTF-8."""
    return pc.utf8_trim_whitespace(cast_or_null(values, pa.large_string()))


def _numbers(values: pa.Array) -> pa.Array:
    """Integers or floats; null for other texts and for numbers that are not finite."""
    if is_text(values.type):
        texts = _trimmed(values)
        texts = pc.if_else(pc.match_substring_regex(texts, _NUMBER), texts, None)
        try:
            return texts.cast(pa.int64())
        except pa.ArrowInvalid:  # some have a fraction, or are beyond int64
            values = texts.cast(pa.float64())
    numbers = plain_numbers(values)
    if pat.is_integer(numbers.type):
        return numbers.cast(pa.int64(), safe=False)  # beyond int64: negative, which is out of range
    numbers = numbers.cast(pa.float64())
    return pc.if_else(pc.is_finite(numbers), numbers, None)


def _since_1970(values: pa.Array, unit: str) -> pa.Array:
    numbers = _numbers(values)
    limit = LATEST_S * UNITS[unit]
    numbers = pc.if_else(pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, limit)), numbers, None)
    if pat.is_floating(numbers.type):
        micros = pc.floor(pc.divide(pc.multiply(numbers, 1e6), float(UNITS[unit])))
        return micros.cast(pa.int64()).cast(pa.timestamp("us"))
    return numbers.cast(pa.timestamp(unit))


def _of_excel(values: pa.Array) -> pa.Array:
    days = pc.subtract(_numbers(values).cast(pa.float64()), float(_EXCEL_1970))
    days = pc.if_else(pc.and_(pc.greater_equal(days, 0.0), pc.less(days, LATEST_S / 86_400)), days, None)
    # Spreadsheets keep milliseconds.
    return pc.round(pc.multiply(days, float(_DAY_MS))).cast(pa.int64()).cast(pa.timestamp("ms"))


def _within_the_day(texts: pa.Array) -> tuple[pa.Array, pa.Array | None]:
    """The texts with 00:00 for 24:00, and with 59 for a leap second; the durations to add, or None."""
    later = None
    for part, pattern, replacement, seconds in (
        ("24:00", r"(^|[ T]|\d{4}:)24(:00(?::00(?:[.,]0+)?)?)([^:.\d]|$)", r"\100\2\3", 86_400),
        ("59:60", r"(\d\d:59):60", r"\1:59", 1),
    ):
        if not pc.any(pc.match_substring(texts, part)).as_py():
            continue
        found = pc.match_substring_regex(texts, pattern).fill_null(False)
        texts = pc.replace_substring_regex(texts, pattern, replacement)
        added = pc.if_else(found, seconds, 0).cast(pa.duration("s"))
        later = added if later is None else pc.add(later, added)
    return texts, later


def _seconds_of_digits(values: pa.Array, widths: Sequence[int]) -> I64:
    """[n], seconds since 1970; -1 for digits that do not form a date from 1973 to 2200."""
    if is_text(values.type):  # only numbers lose leading zeros
        texts = _trimmed(values)
        values = pc.if_else(pc.match_substring_regex(texts, f"^[0-9]{{{sum(widths)}}}$"), texts, None)
    numbers = _numbers(values)
    if pat.is_floating(numbers.type):
        whole = pc.and_(pc.equal(pc.floor(numbers), numbers), pc.less(pc.abs(numbers), 1e15))
        numbers = pc.if_else(whole, numbers, None).cast(pa.int64())
    parts: list[I64] = []
    rest: I64 = numbers.fill_null(-1).to_numpy(zero_copy_only=False)
    for width in reversed(widths):
        parts.append(rest % 10**width)
        rest = rest // 10**width
    absent = [np.zeros_like(rest)] * (6 - len(parts))
    year, month, day, hour, minute, second = parts[::-1] + absent
    year = year + (2000 if widths[0] == 2 else 0)
    valid = (rest == 0) & (year >= 1973) & (year < 2200) & (month >= 1) & (month <= 12) & (day >= 1)
    valid &= (hour < 24) & (minute < 60) & (second < 60)
    months = np.where(valid, (year - 1970) * 12 + month - 1, 0)
    days = _first_days(months) + day - 1
    valid &= days < _first_days(months + 1)
    return np.where(valid, days * 86_400 + hour * 3600 + minute * 60 + second, -1)


def _first_days(months: I64) -> I64:
    """[n], days since 1970 of the first days of months, which are counted from January 1970."""
    days: I64 = months.astype("datetime64[M]").astype("datetime64[D]").astype(np.int64)
    return days


def _iso(texts: pa.Array) -> pa.Array:
    for pattern, replacement in (
        (r"(:\d\d),(\d)", r"\1.\2"),  # a decimal comma
        (r" ?(Z|UTC)$", "Z"),
        (r"(\d) ([-+]\d\d:?\d\d)$", r"\1\2"),
    ):
        texts = pc.replace_substring_regex(texts, pattern, replacement)
    texts = pc.if_else(pc.match_substring_regex(texts, _ISO), texts, None)
    zoned = pc.match_substring_regex(texts, _ISO_ZONE)
    first = zoned.drop_null()[:1].to_pylist()
    is_zoned = bool(first and first[0])
    texts = pc.if_else(pc.equal(zoned, is_zoned), texts, None)
    # Microseconds hold every year, nanoseconds nine digits of a second.
    unit = "ns" if pc.any(pc.match_substring_regex(texts, _NANOSECONDS)).as_py() else "us"
    return cast_or_null(texts, pa.timestamp(unit, "UTC" if is_zoned else None))


def cast_or_null(texts: pa.Array, kind: pa.DataType) -> pa.Array:
    """The cast array, with nulls for the values that cannot be cast, e.g. 30 February."""
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        if len(texts) == 1:
            return pa.nulls(1, kind)
        half = len(texts) // 2
        return pa.concat_arrays([cast_or_null(texts[:half], kind), cast_or_null(texts[half:], kind)])


def _by_strptime(texts: pa.Array, time_format: str, *, padded: bool) -> pa.Array:
    """Timestamps of texts in a format of `strptime`.

    Args:
        padded: the texts were numbers, which have lost their leading zeros.
    """
    encoded = pc.dictionary_encode(texts)
    distinct = encoded.dictionary
    if padded:
        width = len(datetime(2000, 12, 31, 23, 59, 59).strftime(time_format))
        distinct = pc.utf8_lpad(distinct, width, "0")
    kind = pa.timestamp("us", "UTC" if "z" in _directives(time_format) else None)
    moments = _written_in_full(distinct, time_format) if kind.tz is None else pa.nulls(len(distinct), kind)
    rest = moments.is_null().to_numpy(zero_copy_only=False)
    if rest.any():
        read = _reader(time_format)
        others = np.flatnonzero(rest)
        read_others = pa.array([read(text) for text in distinct.take(pa.array(others)).to_pylist()], kind)
        moments = pc.replace_with_mask(moments, pa.array(rest), read_others)
    return moments.take(encoded.indices)


def _written_in_full(texts: pa.Array, time_format: str) -> pa.Array:
    """The timestamps of the texts that are just as the format writes them; null for others.

    Arrow is ten times as fast as Python, but reads 31 February as 2 March.
    """
    kind = pa.timestamp("us")
    try:
        moments = pc.strptime(texts, format=time_format, unit="s", error_is_null=True)
        same = pc.equal(pc.strftime(moments, format=time_format), texts)
    except pa.ArrowInvalid:  # a directive that Arrow lacks
        return pa.nulls(len(texts), kind)
    return pc.if_else(same, moments, None).cast(kind)


def _reader(time_format: str) -> Callable[[str], datetime | None]:
    """Reads a text in a format; None for any other text."""
    # strptime reads 1122019 by %d%m%Y as 11 February: without marks between them, numbers must have all digits. Digits
    # of a second (%f) at the end may be fewer than six.
    adjacent = re.search(r"%[dfGHIjmMSUVWyY]%[dfGHIjmMSUVWyY]", time_format) is not None
    optional = "0" if time_format.endswith("%f") else ""

    def read(text: str) -> datetime | None:
        if any(sign.isdigit() and not sign.isascii() for sign in text):
            return None  # strptime takes the digits of every script
        try:
            moment = datetime.strptime(text, time_format)
            if adjacent and moment.strftime(time_format).rstrip(optional) != text.rstrip(optional):
                return None
            return moment if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, OverflowError):  # a time of the year 1 or 9999 that another zone has in another year
            return None

    return read
