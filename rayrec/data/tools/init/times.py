"""Recognizes the column with the time of a row, by its values and its name, and reads it as seconds since 1970.

Training reads Arrow timestamps, dates, and integers in s, ms, us or ns (`schema.timestamp`). Other times, e.g. texts
and 20141001, serve only to divide rows into training and evaluation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import UNITS, decoded, is_text, seconds_of
from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.times import DIGITS, EXCEL, ISO, USAGE, check_format, row_seconds
from rayrec.data.tools.init.column_facts import TIME_NAMES, ColumnFacts, named_id, time_unit
from rayrec.data.tools.init.outcomes import constant_in_groups
from rayrec.storage.errors import DataError, suggestion

_DAYS = (
    *("%m/%d/%Y", "%d/%m/%Y", "%Y/%m/%d", "%m/%d/%y", "%d/%m/%y"),
    *("%m-%d-%Y", "%d-%m-%Y", "%Y-%m-%d", "%d.%m.%Y", "%Y.%m.%d", "%d.%m.%y"),
    *("%d-%b-%Y", "%d-%b-%y", "%d/%b/%Y", "%d %b %Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y"),
)
_HOURS = ("", " %H:%M", " %H:%M:%S", " %H:%M:%S.%f", " %I:%M %p", " %I:%M:%S %p")
_TEXT_FORMATS = (
    ISO,
    *(day + hour for day in _DAYS for hour in _HOURS if day != "%Y-%m-%d" or "%I" in hour),  # others are ISO 8601
    "%a %b %d %H:%M:%S %Y",
    "%a %b %d %H:%M:%S %z %Y",
    "%a, %d %b %Y %H:%M:%S %z",
    "[%d/%b/%Y:%H:%M:%S %z]",
    "%d/%b/%Y:%H:%M:%S %z",
)
# Texts that a directive of a format may have.
_OF_DIRECTIVE = {
    **dict.fromkeys("mdHIMS", r"\d\d?"),
    **dict.fromkeys("abB", r"[^\W\d]+"),
    "Y": r"\d{4}",
    "y": r"\d\d",
    "f": r"\d{1,6}",
    "p": "[AaPp][Mm]",
    "z": r"(Z|[-+]\d\d:?\d\d)",
}
_ZERO_DATE = re.compile("0000[-/.]?00[-/.]?00")
_WORDS = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|[^\W\d_A-Za-z]+")
_TIME_WORDS = {"time", "ts", "timestamp", "date", "datetime", "day", "hour", "at", "when", "时间", "时间戳", "日期"}
# Times of something else than the row: of a user's or an item's life, or in the future.
_OTHER_WORDS = {"birth", "birthday", "born", "dob", "release", "released", "publish", "published", "register",
                "registered", "signup", "joined", "expires", "expiry", "expiration", "until", "deadline"}  # fmt: skip
# Limits for columns without a telling name: years, number of rows, number of distinct values.
_USUAL_S = (788_918_400, 2_051_222_400)  # 1995 to 2035
_USUAL_DAYS = (34_700, 49_310)  # the same as spreadsheets count days
_MIN_ROWS = 20
_MIN_DISTINCT = 5
_MIN_PERIODS = 3
_SORTED = 0.95
_DISTINCT = 0.5
_MAX_TEXTS = 1000
_MOST = 0.5


@dataclass(frozen=True, slots=True)
class TimeColumn:
    """The column with the time of a row.

    Args:
        format: as in `--time COLUMN=FORMAT`; empty for Arrow timestamps and dates.
        is_readable: True if training can read it as `schema.timestamp`.
    """

    column: str
    format: str
    is_readable: bool

    @property
    def option(self) -> str:
        """The `--time` option that chooses this column."""
        return f"{self.column}={self.format}" if self.format else self.column

    def seconds(self, table: pa.Table) -> I64:
        """[n], seconds since 1970, rounded down.

        Raises:
            DataError: a null, or a value that does not have the format.
        """
        return read_seconds(table.column(self.column).combine_chunks(), self.format, self.column)


def read_seconds(array: pa.Array, time_format: str, column: str) -> I64:
    """[n], seconds since 1970, of values in a format. Raises as `TimeColumn.seconds`."""
    array = decoded(array)
    if array.null_count:
        fix = "choose another --time, or remove these rows"
        raise DataError(f"the time is null in {array.null_count:,} of {len(array):,} rows", column=column, fix=fix)
    if not time_format:
        return seconds_of(array, "s")
    seconds = row_seconds(array, time_format)
    if (wrong := np.flatnonzero(seconds < 0)).size:
        value = array[int(wrong[0])].as_py()
        problem = f"{value!r} is not a time in the format {time_format!r} from 1970 to 2200"
        fix = f"give --time {column}=FORMAT: {USAGE}"
        if _ZERO_DATE.match(str(value)):
            problem = f"{value!r} stands for no time (MySQL), in {len(wrong):,} of {len(array):,} rows"
            fix = "remove these rows, or choose another --time"
        raise DataError(problem, column=column, fix=fix)
    return seconds


def choose_time(
    columns: Sequence[ColumnFacts], table: pa.Table, option: str | None
) -> tuple[TimeColumn | None, list[ColumnFacts], list[str]]:
    """Chooses the column with the time of a row.

    Args:
        option: COLUMN or COLUMN=FORMAT; None: a column of timestamps or dates, or one recognized by its values.

    Returns:
        the column, or None; the facts with its role; a question for each column that may be a time.

    Raises:
        DataError: an unknown column or format, or a value that does not have the format.
    """
    if option is not None:
        chosen = _from_option(option, table)
        chosen.seconds(table)  # raises an error
        return chosen, _with_time(columns, chosen, []), []
    typed = next((c for c in columns if c.role == "timestamp"), None)
    if typed is not None:
        chosen = TimeColumn(typed.name, "" if typed.low is None else time_unit(typed.low, typed.high or 0) or "", True)
        return chosen, list(columns), []
    ids = [c.name for c in columns if c.role in ("id", "group") and c.distinct > 1]
    sure: list[TimeColumn] = []
    questions: list[str] = []
    columns = list(columns)
    for number, facts in enumerate(columns):
        if facts.role in ("label", "sample_weight") or facts.outcome:
            continue
        array = decoded(table.column(facts.name).combine_chunks())
        time_format, is_sure = _recognized(facts.name, array.drop_null())
        if not time_format:
            continue
        if array.null_count:
            if is_sure:
                problem = f"null in {array.null_count:,} of {len(array):,} inspected rows"
                fix = f"to split by it, remove these rows and add --time '{facts.name}={time_format}'"
                questions.append(f"{facts.name}: seems to be the time of a row, but is {problem}; {fix}")
                columns[number] = replace(facts, role="unused", note=f"a time, {problem}")
            continue
        if is_text(array.type) and (wrong := np.flatnonzero(row_seconds(array, time_format) < 0)).size:
            problem = (
                f"{len(wrong):,} of {len(array):,} inspected rows have none, e.g. {array[int(wrong[0])].as_py()!r}"
            )
            fix = f"to split by it, remove these rows and add --time '{facts.name}={time_format}'"
            questions.append(f"{facts.name}: seems to be the time of a row, but {problem}; {fix}")
            columns[number] = replace(facts, role="unused", note=f"a time, but {problem}")
            continue
        candidate = TimeColumn(facts.name, time_format, time_format in UNITS and pat.is_integer(array.type))
        is_sure = is_sure and not _belongs_to_an_id(array, [name for name in ids if name != facts.name], table)
        if is_sure:
            sure.append(candidate)
        else:
            questions.append(f"{facts.name}: may be the time of a row; to split by it, add --time '{candidate.option}'")
    if not sure:
        return None, list(columns), questions
    sure.sort(key=lambda one: (one.column.lower() not in TIME_NAMES, not one.is_readable, not _named_time(one.column)))
    return sure[0], _with_time(columns, sure[0], [one.column for one in sure[1:]]), []


def _with_time(columns: Sequence[ColumnFacts], chosen: TimeColumn, others: Sequence[str]) -> list[ColumnFacts]:
    """Gives the chosen column its role. Other columns of times are unused."""

    def with_role(facts: ColumnFacts) -> ColumnFacts:
        if facts.name == chosen.column and chosen.is_readable:
            return replace(facts, role="timestamp", note="", time_format=chosen.format)
        if facts.name == chosen.column:
            note = f"the time of a row, as {chosen.format}; used only to divide the rows. "
            note += "For metrics by day and features of the time, convert the column to timestamps"
            return replace(facts, role="unused", note=note)
        if facts.name in others or facts.role == "timestamp":
            return replace(facts, role="unused", note=f"a time; the time of a row is {chosen.column!r}")
        return facts

    return [with_role(facts) for facts in columns]


def without_periods(columns: Sequence[ColumnFacts], table: pa.Table, time: str, seconds: I64) -> list[ColumnFacts]:
    """Leaves out ids and integers of periods, e.g. dates: later rows have values that no training row has.

    Args:
        time: name of the column with the time of a row.
        seconds: [n], the times.
    """

    def is_period(facts: ColumnFacts) -> bool:
        array = decoded(table.column(facts.name).combine_chunks())
        if facts.role not in ("id", "dense") or facts.stated or facts.nulls or named_id(facts.name.lower()):
            return False
        if not (is_text(array.type) or pat.is_integer(array.type)):
            return False
        return _follow_each_other(pc.dictionary_encode(array).indices.to_numpy(), seconds)

    note = f"its values follow each other in {time!r} and do not come again: another form of the time?"
    options = {"id": "--ids", "dense": "--numbers"}
    return [
        replace(c, role="unused", note=f"{note} If not, add it with {options[c.role]} {c.name}") if is_period(c) else c
        for c in columns
    ]


def _follow_each_other(codes: I64, seconds: I64) -> bool:
    """True if the times of each value are all before or after the times of every other value."""
    num_values = int(codes.max(initial=-1)) + 1
    if len(codes) < _MIN_ROWS or not _MIN_PERIODS <= num_values <= len(codes) // 2:
        return False
    first, last = np.full(num_values, np.iinfo(np.int64).max), np.full(num_values, np.iinfo(np.int64).min)
    np.minimum.at(first, codes, seconds)
    np.maximum.at(last, codes, seconds)
    order = np.argsort(first)
    return bool((first[order][1:] >= last[order][:-1]).all())


def _from_option(option: str, table: pa.Table) -> TimeColumn:
    names = [name for name in table.column_names if option == name or option.startswith(f"{name}=")]
    if not names:
        column = option.partition("=")[0]
        hint = suggestion(column, table.column_names)
        raise DataError(f"--time {option}: there is no column {column!r}{hint}", fix="use --time COLUMN[=FORMAT]")
    column = max(names, key=len)
    time_format, array = option[len(column) + 1 :], decoded(table.column(column).combine_chunks())
    if pat.is_timestamp(array.type) or pat.is_date(array.type):
        if time_format:
            problem = f"--time {option}: the column has type {array.type}, which needs no format"
            raise DataError(problem, column=column, fix=f"use --time {column}")
        return TimeColumn(column, "", True)
    if time_format:
        try:
            check_format(time_format)
        except ValueError as error:
            problem = f"--time {option}: unknown format {time_format!r}: {error}"
            raise DataError(problem, column=column, fix=f"use {USAGE}") from None
    if not time_format:
        time_format, _ = _recognized(column, array.drop_null())
    if not time_format:
        first = array.drop_null()[:1].to_pylist()
        problem = (
            f"--time {option}: the format of the times is not clear; the first value is {first[0] if first else None!r}"
        )
        raise DataError(problem, column=column, fix=f"give --time {column}=FORMAT: {USAGE}")
    return TimeColumn(column, time_format, time_format in UNITS and pat.is_integer(array.type))


def _recognized(name: str, array: pa.Array) -> tuple[str, bool]:
    """The format of times without nulls, and True if they certainly are; an empty format for other columns."""
    if len(array) < 2:
        return "", False
    is_named, is_other = _named_time(name), bool(_OTHER_WORDS & _words(name))
    if is_text(array.type):
        formats, is_sure = _text_formats(pc.unique(array[: 100 * _MAX_TEXTS])[:_MAX_TEXTS])
        if is_sure and len(formats) > 1:  # a later day of a month may tell
            formats = [text for text in formats if (row_seconds(pc.unique(array), text) >= 0).all()] or formats
        # 8.10.12 may be a version.
        is_sure = is_sure and not is_other and len(formats) == 1 and (is_named or "%y" not in formats[0])
        return (formats[0], is_sure) if formats else ("", False)
    if not (pat.is_integer(array.type) or pat.is_floating(array.type)) or named_id(name.lower()):
        return "", False
    numbers = array.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
    if not np.isfinite(numbers).all() or (low := numbers.min()) == (high := numbers.max()) or high >= 2**63:
        return "", False
    distinct = len(np.unique(numbers))
    if unit := time_unit(low, high):
        usual = low >= _USUAL_S[0] * UNITS[unit] and high < _USUAL_S[1] * UNITS[unit]
        is_sorted = np.count_nonzero(np.diff(numbers) >= 0) >= _SORTED * (len(numbers) - 1)
        spread = len(numbers) >= _MIN_ROWS and (is_sorted or distinct >= _DISTINCT * len(numbers))
        is_sure = is_named or (usual and spread and distinct >= _MIN_DISTINCT and pat.is_integer(array.type))
        return (unit, is_sure and not is_other) if is_named or usual else ("", False)
    if is_named and not is_other and low >= _USUAL_DAYS[0] and high < _USUAL_DAYS[1]:
        return EXCEL, False
    if not pat.is_integer(array.type):
        return "", False
    for time_format in DIGITS:
        if (row_seconds(pc.unique(array), time_format) >= 0).all():
            is_sure = is_named or (len(numbers) >= _MIN_ROWS and distinct >= _MIN_DISTINCT)
            return time_format, is_sure and not is_other
    return "", False


def _text_formats(values: pa.Array) -> tuple[list[str], bool]:
    """The formats of texts, and True if all texts have them; else most texts have them.

    Two formats that all texts have differ in the order of day, month and year.
    """
    if not (pat.is_string(values.type) or pat.is_large_string(values.type)) or not len(values):
        return [], False
    first = [text.strip() for text in values[:20].to_pylist()]
    written = [text for text in _TEXT_FORMATS if text == ISO or any(map(_pattern(text).fullmatch, first))]
    likely = [text for text in (*written, *DIGITS) if (row_seconds(values[:20], text) >= 0).any()]
    shares = {text: float((row_seconds(values, text) >= 0).mean()) for text in likely}
    # Where all months are May, %b and %B read the same times.
    complete = [*{row_seconds(values, text).tobytes(): text for text, share in shares.items() if share == 1}.values()]
    most = [text for text, share in shares.items() if share >= _MOST]
    return (complete, True) if complete else (most, False)


@cache
def _pattern(time_format: str) -> re.Pattern[str]:
    """A pattern of all texts in the format, and of some others; compiled once, because most texts are no times."""
    parts = re.split("%(.)", time_format)
    return re.compile("".join(_OF_DIRECTIVE[part] if n % 2 else re.escape(part) for n, part in enumerate(parts)))


def _words(name: str) -> set[str]:
    return {word.lower() for word in _WORDS.findall(name)}


def _named_time(name: str) -> bool:
    return bool(_words(name) & _TIME_WORDS)


def _belongs_to_an_id(array: pa.Array, ids: Sequence[str], table: pa.Table) -> bool:
    """True if an id determines the time, e.g. an item its release."""
    codes = pc.dictionary_encode(array).indices.to_numpy().astype(np.int64)
    keys = (
        pc.dictionary_encode(decoded(table.column(n).combine_chunks()), null_encoding="encode").indices for n in ids
    )
    return any(constant_in_groups(codes, key.to_numpy().astype(np.int64)) for key in keys)
