"""Finds out how a text file is written: encoding, separator, header, padding."""

from __future__ import annotations

import codecs
import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

from rayrec.data.formats.text_options import TextOptions
from rayrec.storage.errors import DataError
from rayrec.storage.file_kinds import kind_of

_LOOK_LINES = 1000
# By rank, if several divide the lines evenly. A blank comes last, because texts have blanks, too.
_SEPARATORS = ("::", ",", "\t", ";", "|", "\x01", "^", " ")
# Minimum fraction of lines with as many cells as the first line.
_EVEN = 0.95
_VALUE = re.compile(r"[-+]?([0-9][0-9,]*\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?|[0-9]{4}-[0-9]{2}-[0-9]{2}\b.*")
_NAME = re.compile(r"[^\W\d][^\n]*")
_NO_NAMES = frozenset({"na", "nan", "null", "none", "n/a", "unknown", "true", "false"})
_COMMENT = re.compile(r"\s*(#|%|//)")
_SAMPLE = 1000
_KEY_DIGITS = 9  # of a plain column of numbers
_FIXED_WIDTH = (
    "the lines have no separator and one length: columns of a fixed width are not read",
    "write them with a separator, e.g. pandas.read_fwf(FILE).to_csv(OUT, index=False)",
)
# Half of the bytes of ASCII text in UTF-16 are zero.
_ZEROS = 0.3
_MARKS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16"))


@dataclass(frozen=True, slots=True)
class Layout:
    """How a text file is written.

    Args:
        columns: column names; `c0`, `c1`, … without a header; empty if no line could be parsed.
        header: True if the first line holds names.
        renamed: True if `columns` are not the names as that line has them, which may have spaces around them.
        separator: text between cells.
        encoding: name of the encoding.
        escape: character that makes the next one part of the cell, or None.
        padded: columns in which every value starts with a space.
        comments: number of lines to skip before the header, or before the first row: comments and empty lines.
        notes: what was found and is not usual, for the user.
    """

    columns: list[str]
    header: bool
    separator: str = ","
    encoding: str = "utf-8"
    escape: str | None = None
    padded: frozenset[str] = frozenset()
    notes: tuple[str, ...] = ()
    comments: int = 0
    renamed: bool = False


def find_layout(data: bytes, whole: bool, options: TextOptions, usual: str) -> Layout:
    """The layout of a file.

    Args:
        data: the beginning of the file.
        whole: whether this is the whole file.
        usual: the separator that the name of the file tells.

    Raises:
        DataError: several columns are named, but they have a fixed width.
        ValueError: the file is not text.
    """
    if (kind := kind_of(data)) is not None:
        raise ValueError(f"the file is not text but {kind[0]}")
    encoding = options.encoding or _encoding(data)
    text = codecs.getincrementaldecoder(encoding)("replace").decode(data).removeprefix("\ufeff")
    if not whole:
        text = text[: max(text.rfind("\n"), text.rfind("\r")) + 1]
    escaped = options.model_copy(update={"escape": "\\"})
    if options.escape is None and options.quote and _escapes_quotes(text, usual, options, escaped):
        options = escaped
    comments, text = _without_comments(text, usual, options)
    separator = options.separator or _separator(text, usual, options)
    lines = _cells(text, separator, options)
    notes = [] if separator == usual or options.separator else [f"cells are separated by {separator!r}"]
    notes += [] if encoding == "utf-8" or options.encoding else [f"the encoding is {encoding}"]
    notes += [f"rows and names begin in line {comments + 1}, after comments"] if comments else []
    notes += ["quotes inside of quotes have a backslash"] if options.escape == "\\" else []
    if options.separator is None and _has_fixed_width(text, lines):
        problem, fix = _FIXED_WIDTH
        if options.names is not None and len(options.names) > 1:
            raise DataError(problem, fix=fix)
        notes.append(f"{problem}; {fix}")
    if not lines:
        has_names = options.header is not False
        return Layout([], has_names, separator, encoding, options.escape, notes=tuple(notes), comments=comments)
    first, later = lines[0], lines[1:]
    header = options.header
    if header is None:
        header = options.names is None and _is_header(first, later)
    if not header and options.names is None:
        notes.append(f"no header line: columns are named c0 to c{len(first) - 1}")
    columns = [name.strip() for name in first] if header else [f"c{position}" for position in range(len(first))]
    columns = list(options.names) if options.names is not None else columns
    renamed = bool(header) and columns != first
    if renamed:  # pyarrow would count empty lines before the names
        comments += len(re.findall(r"\r\n|\r|\n", text[: len(text) - len(text.lstrip())]))
    rows = later if header else lines
    values = {
        name: [row[position] for row in rows if position < len(row) and row[position]]
        for position, name in enumerate(columns)
    }
    padded = (name for name, cells in values.items() if cells and all(cell.startswith(" ") for cell in cells))
    # A quoted cell may begin with a space.
    padding = frozenset(padded if separator != " " and f"{options.quote} " not in text else ())
    return Layout(columns, header, separator, encoding, options.escape, padding, tuple(notes), comments, renamed)


def _without_comments(text: str, usual: str, options: TextOptions) -> tuple[int, str]:
    """The number of lines that are comments, and the text after them.

    Comments are the first lines, if all start with #, all with % or all with //, up to a line with as many cells as the
    lines below. So a header `#user,item` is not a comment.
    """
    lines = re.split(r"(?<=\n)|(?<=\r)(?!\n)", text)
    begin = _COMMENT.match(lines[0])
    if begin is None:
        return 0, text
    count = 0
    while count < len(lines) and (not lines[count].strip() or lines[count].lstrip().startswith(begin[1])):
        count += 1
    below = "".join(lines[count:])
    separator = options.separator or _separator(below, usual, options)
    first = _cells(below, separator, options)[:1]
    if not first or len(first[0]) == 1:
        return 0, text
    as_wide = (
        number
        for number in range(count)
        if [len(cells) for cells in _cells(lines[number], separator, options)] == [len(first[0])]
    )
    comments = next(as_wide, count)
    return comments, "".join(lines[comments:])


def _escapes_quotes(text: str, usual: str, options: TextOptions, escaped: TextOptions) -> bool:
    """Whether quotes inside of quotes have a backslash before them, rather than being written twice.

    A backslash may also be the last character of a cell; then as many lines are even only without the escape.
    """
    quote = options.quote
    if f"\\{quote}" not in text or quote * 2 in text.replace(f"\\{quote}", ""):
        return False
    separator = options.separator or _separator(text, usual, escaped)
    return _even_lines(text, separator, escaped) >= _even_lines(text, separator, options)


def _even_lines(text: str, separator: str, options: TextOptions) -> int:
    """Number of lines with as many cells as the first one."""
    lines = _cells(text, separator, options)
    return sum(len(line) == len(lines[0]) for line in lines)


def _encoding(data: bytes) -> str:
    """The encoding that the first bytes name, else UTF-16 if every second byte is zero, else UTF-8."""
    sample = data[:_SAMPLE]
    for first, name in ((1, "utf-16-le"), (0, "utf-16-be")):
        zeros, others = sample[first::2].count(0), sample[1 - first :: 2].count(0)
        if zeros > _ZEROS * len(sample) and not others and not data.startswith(tuple(mark for mark, _ in _MARKS)):
            return name
    return next((name for mark, name in _MARKS if data.startswith(mark)), "utf-8")


def _separator(text: str, usual: str, options: TextOptions) -> str:
    """The usual separator, unless it does not divide the lines and another divides them evenly."""
    if len(usual) == 1 and _width(text, usual, options) > 1:
        return usual
    widths = {separator: _width(text, separator, options) for separator in _SEPARATORS if separator != usual}
    best = max(widths, key=lambda separator: (widths[separator] > 1, -_SEPARATORS.index(separator)))
    if widths[best] <= 1:
        return usual
    # All cells between two || are empty if || is the separator.
    doubled = _width(text, 2 * best, options)
    return 2 * best if doubled > 2 and widths[best] == 2 * doubled - 1 else best


def _width(text: str, separator: str, options: TextOptions) -> int:
    """Cells of the first line, if nearly all lines have as many; else 0."""
    lines = _cells(text, separator, options)
    if not lines:
        return 0
    width = len(lines[0])
    return width if sum(len(line) == width for line in lines) >= _EVEN * len(lines) else 0


def _has_fixed_width(text: str, lines: Sequence[Sequence[str]]) -> bool:
    """Whether lines that no separator divides are as long as each other and have blanks or digits only."""
    whole = [line for line in text.splitlines()[:_LOOK_LINES] if line]
    if len(whole) < 3 or len({len(line) for line in whole[1:]}) > 1 or any(len(line) > 1 for line in lines):
        return False
    return all(re.search(r"\S\s+\S", line) or line.isdigit() for line in whole[1:]) and len(whole[1]) > _KEY_DIGITS


def _cells(text: str, separator: str, options: TextOptions) -> list[list[str]]:
    """The cells of the first lines."""
    if len(separator) > 1:
        text, separator = text.replace(separator, "\x1f"), "\x1f"
    reader = csv.reader(
        io.StringIO(text, newline=""),
        delimiter=separator,
        quotechar=options.quote or None,
        quoting=csv.QUOTE_MINIMAL if options.quote else csv.QUOTE_NONE,
        escapechar=options.escape,
        doublequote=options.escape is None,
    )
    try:
        return [line for line in islice(reader, _LOOK_LINES) if line]
    except csv.Error:  # a cell longer than Python's reader allows
        return []


def _is_header(first: Sequence[str], later: Sequence[Sequence[str]]) -> bool:
    """Whether the first line holds names.

    It does if there are numbers below one of its texts. Otherwise it is data if one of its cells is a number or a date,
    or if at least half of its cells occur again in later lines of the same column.
    """
    cells = [cell.strip() for cell in first]
    columns = [[line[position] for line in later if position < len(line)] for position in range(len(cells))]
    if any(_is_name(cell) and _are_values(below) for cell, below in zip(cells, columns, strict=True)):
        return True
    if any(_VALUE.fullmatch(cell) for cell in cells):
        return False
    return 2 * sum(bool(cell) and cell in below for cell, below in zip(first, columns, strict=True)) < len(first)


def _is_name(cell: str) -> bool:
    return _NAME.fullmatch(cell) is not None and cell.lower() not in _NO_NAMES


def _are_values(cells: Sequence[str]) -> bool:
    """Whether nearly all cells that are not empty are numbers or dates."""
    present = [cell.strip() for cell in cells if cell.strip()]
    return bool(present) and sum(_VALUE.fullmatch(cell) is not None for cell in present) >= 0.9 * len(present)
