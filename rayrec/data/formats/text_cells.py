"""Turns the cells of a text column into numbers, times and lists. Errors carry the position of the cell."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.times import parse_times

JSON = "json"
_LEADING_ZERO = r"^[-+]?0[0-9]"
# Brackets around a list, without brackets of their kind inside: `(a)|(b)` are two items.
_BRACKETS = (r"^\[([^\[\]]*)\]$", r"^\{([^{}]*)\}$", r"^\(([^()]*)\)$")
_WHOLE = r"^[-+]?[0-9]+$"
NUMBER = r"^[-+]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?$"


class CellError(ValueError):
    """A cell that does not have the type of its column.

    Args:
        index: position of the cell in the array.
    """

    def __init__(self, index: int, text: str) -> None:
        super().__init__(text)
        self.index = index


def number_type(
    text: pa.Array, inferred: pa.DataType, decimal: str, thousands: str | None, *, leading_zeros: bool = False
) -> pa.DataType:
    """The type of a column, from its first cells.

    Whole numbers with leading zeros are text. Those beyond int64 are uint64, and text if they are beyond that, too: a
    float would make one number of many.

    Args:
        inferred: the type that pyarrow infers.
        leading_zeros: numbers with leading zeros are numbers.
    """
    present = _plain(text.drop_null(), decimal, thousands)
    if not len(present):
        return inferred
    if thousands is not None and not _all(pc.utf8_trim_whitespace(text.drop_null()), _grouped(decimal, thousands)):
        return inferred  # e.g. 10.0.0.1, where "." is between thousands
    if _all(present, _WHOLE):
        if not leading_zeros and _any(text.drop_null(), _LEADING_ZERO):
            return pa.string()
        numbers = [int(value) for value in pc.unique(present).to_pylist()]
        if min(numbers) >= -(2**63) and max(numbers) < 2**63:
            return pa.int64()
        return pa.uint64() if min(numbers) >= 0 and max(numbers) < 2**64 else pa.string()
    return pa.float64() if _all(present, NUMBER) else inferred


def numbers(
    kind: pa.DataType, decimal: str = ".", thousands: str | None = None, *, leading_zeros: bool = False
) -> Callable[[pa.Array], pa.Array]:
    """Parses numbers; a whole number with a leading zero is an error, because it is likely an id."""

    def parse(text: pa.Array) -> pa.Array:
        plain = pc.utf8_trim_whitespace(text)
        if pat.is_integer(kind) and not leading_zeros:
            _refuse(plain, pc.match_substring_regex(plain, _LEADING_ZERO), "has a leading zero, which a number loses")
        return _cast(pc.replace_substring_regex(_plain(plain, decimal, thousands), r"^\+", ""), kind)

    return parse


def times(time_format: str) -> Callable[[pa.Array], pa.Array]:
    """Parses times in a format of `parse_times` as timestamps in microseconds, without a zone: UTC, if they had one."""

    def parse(text: pa.Array) -> pa.Array:
        parsed = parse_times(text, time_format)
        wrong = pc.and_(pc.is_null(parsed), pc.is_valid(text))
        _refuse(pc.utf8_trim_whitespace(text), wrong, f"does not have the time format {time_format!r}")
        return parsed.cast(pa.timestamp("us"), safe=False)

    return parse


def list_type(text: pa.Array, separator: str) -> pa.DataType:
    """The type of the lists in the first cells of a column: of whole numbers, numbers, or texts."""
    try:
        items = pc.list_flatten(_split(text.drop_null(), separator))
    except CellError:
        return pa.list_(pa.string())
    if not pat.is_string(items.type):
        return pa.list_(items.type)
    return pa.list_(number_type(items, pa.string(), ".", None))


def list_parser(kind: pa.DataType, separator: str) -> Callable[[pa.Array], pa.Array]:
    """Parses cells with lists; see `TextOptions.lists`."""

    def parse(text: pa.Array) -> pa.Array:
        lists = _split(text, separator)
        if lists.type == kind:
            return lists
        try:
            return lists.cast(kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
            for index, cell in enumerate(lists):  # the first cell that does not fit
                try:
                    pa.array([cell.as_py()], lists.type).cast(kind)
                except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
                    raise CellError(
                        index, f"the list {text[index].as_py()!r} does not hold {kind.value_type}"
                    ) from None
            raise

    return parse


def _split(text: pa.Array, separator: str) -> pa.Array:
    if separator != JSON:
        return _divided(text, separator)
    values = [_parsed(index, cell) for index, cell in enumerate(text.to_pylist())]
    try:
        return pa.array(values, None if any(values) else pa.list_(pa.string()))
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        texts = [None if value is None else [str(item) for item in value] for value in values]
        return pa.array(texts, pa.list_(pa.string()))


def _divided(text: pa.Array, separator: str) -> pa.Array:
    """The items between separators, without brackets around lists, quotes around items and a separator at the end."""
    bare = pc.utf8_trim_whitespace(text)
    for pattern in _BRACKETS:
        inner = pc.utf8_trim_whitespace(pc.replace_substring_regex(bare, pattern, r"\1"))
        # `(no genres listed)` is one item.
        is_text = pc.and_(pc.match_substring(inner, " "), pc.invert(pc.match_substring(inner, separator)))
        bare = pc.if_else(is_text, bare, inner)
    if separator.isspace():
        lists = pc.utf8_split_whitespace(bare)
    else:
        end = re.escape(separator.rstrip())
        lists = pc.split_pattern(pc.replace_substring_regex(bare, rf"{end}\s*$", ""), separator)
    if not len(lists):
        return lists
    items = pc.utf8_trim_whitespace(lists.values)
    for quote in "\"'":
        items = pc.replace_substring_regex(items, f"^{quote}(.*){quote}$", r"\1")
    empty = pc.equal(bare, "").fill_null(False).to_numpy(zero_copy_only=False)
    counts = np.diff(lists.offsets.to_numpy())
    offsets = np.concatenate([[0], np.cumsum(np.where(empty, 0, counts))]).astype(np.int32)
    items = items.filter(pa.array(~np.repeat(empty, counts)))
    return pa.ListArray.from_arrays(pa.array(offsets), items, mask=pc.is_null(lists))


def _parsed(index: int, cell: str | None) -> list[Any] | None:
    if cell is None:
        return None
    try:
        value = json.loads(cell)
    except json.JSONDecodeError:
        try:
            value = ast.literal_eval(cell)  # Python writes lists of texts with single quotes
        except (ValueError, SyntaxError):
            value = None
    if not isinstance(value, list | tuple):
        raise CellError(index, f"{cell!r} is not a list; lists look like [1, 2]")
    return list(value)


def _grouped(decimal: str, thousands: str) -> str:
    """The pattern of numbers with or without groups of digits (of three, in India also of two)."""
    group, point = re.escape(thousands), re.escape(decimal)
    return rf"^[-+]?([0-9]{{1,3}}({group}[0-9]{{2,3}})*|[0-9]*)({point}[0-9]*)?([eE][-+]?[0-9]+)?$"


def _plain(text: pa.Array, decimal: str, thousands: str | None) -> pa.Array:
    """Numbers as Python writes them."""
    plain = pc.utf8_trim_whitespace(text)
    if thousands is not None:
        plain = pc.replace_substring(plain, thousands, "")
    return plain if decimal == "." else pc.replace_substring(plain, decimal, ".")


def _cast(text: pa.Array, kind: pa.DataType) -> pa.Array:
    try:
        return text.cast(kind)
    except pa.ArrowInvalid:
        for index, value in enumerate(text):
            try:
                value.cast(kind)
            except pa.ArrowInvalid:
                raise CellError(index, f"CSV conversion error to {kind}: invalid value {value.as_py()!r}") from None
        raise


def _refuse(text: pa.Array, wrong: pa.Array, problem: str) -> None:
    index = pc.index(wrong, True).as_py()
    if index >= 0:
        raise CellError(index, f"{text[index].as_py()!r} {problem}")


def _all(text: pa.Array, pattern: str) -> bool:
    return bool(pc.all(pc.match_substring_regex(text, pattern)).as_py())


def _any(text: pa.Array, pattern: str) -> bool:
    return bool(pc.any(pc.match_substring_regex(pc.utf8_trim_whitespace(text), pattern)).as_py())
