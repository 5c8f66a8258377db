"""`rayrec init`: finds out how text files are written, so that the config says it and nothing is guessed twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.formats.convert import reader_of
from rayrec.data.formats.text_cells import JSON, NUMBER, CellError, list_parser
from rayrec.data.formats.text_files import Csv
from rayrec.data.formats.text_options import TextOptions, text_reading
from rayrec.data.tools.init.stated_roles import StatedRole, StatedRoles, names_in, roles_by_column
from rayrec.storage.errors import DataError

_SEPARATORS = ("|", "^", ";", ", ", ",")
# Separators of ids only, e.g. `N12 N34`: texts, times and numbers with units have them, too.
_ID_SEPARATORS = (" ", "#", "&")
_ID_ITEM = r"^[A-Za-z]{0,8}[-_]?[0-9]+$"
_LIST = r"^\s*\[.*\]\s*$"
# Decimal point, and character between thousands; a file has one pair. By rank, if several fit.
_NOTATIONS = (
    (".", ","),
    (",", None),
    (",", "."),
    *((decimal, thousands) for thousands in (" ", "\xa0", "\u202f", "'", "’") for decimal in (".", ",")),
)
# All numbers with 1 to 3 digits, then groups of three: 1.234 may be 1234.
_THREE_DECIMALS = r"^[-+]?[1-9][0-9]{0,2}(\.[0-9]{3})?$"
_ENOUGH = 100  # cells
_NEARLY_ALL = 0.95
_MOSTLY = 0.8
# A number with a unit, e.g. $9.99, 45 % or 12,50 €.
_WITH_UNIT = r"^[^\w\s.,+-]\s?[-+]?[0-9][0-9.,]*$|^[-+]?[0-9][0-9.,]*\s?[^\w\s.,]$"


def find_text_options(uris: Sequence[str], roles: StatedRoles | None = None) -> tuple[TextOptions, list[str]]:
    """The options for the files, with what the user says, and lines for the user about what was found.

    Looks at the first file that is CSV: separator, encoding, header, lists in cells, decimal point, characters between
    thousands, and columns of numbers with some other words.

    Args:
        roles: stated roles. Texts that are stated to be numbers are read as numbers, and texts that are stated to
            be lists are divided by the separator that most of them have.

    Raises:
        DataError: no separator for cells that are stated to be lists.
    """
    options = text_reading().options
    first = next(((uri, reader) for uri in uris if isinstance(reader := reader_of(uri), Csv)), None)
    if first is None:
        return options, []
    uri, reader = first
    layout = reader.layout(uri)
    if len(set(layout.columns)) < len(layout.columns):
        return options, []  # the conversion refuses it
    updates: dict[str, Any] = {}
    if layout.separator != reader.separator:
        updates["separator"] = layout.separator
    if layout.encoding != "utf-8":
        updates["encoding"] = layout.encoding
    if layout.escape is not None:
        updates["escape"] = layout.escape
    if not layout.header and options.names is None:
        updates["header"] = False
    header = f"names in {f'line {layout.comments + 1}, after comments' if layout.comments else 'the first line'}"
    no_header = f"no header line{f', comments before line {layout.comments + 1}' if layout.comments else ''}"
    lines = [
        f"{uri}: {len(layout.columns)} columns separated by {layout.separator!r}, {layout.encoding}, "
        f"{header if layout.header else no_header}"
    ]
    texts, floats = _first_texts(reader, uri)
    told = {*options.types, *options.lists, *options.times}
    texts = {name: cells for name, cells in texts.items() if name not in told}
    stated = _stated(roles or {}, layout.columns)
    may_be_numbers = {name: cells for name, cells in texts.items() if stated.get(name) != "lists"}
    pairs = [name for name in may_be_numbers if layout.separator == "," and _may_be_pairs(texts[name], options)]
    as_numbers, notation, notes = _find_notation(
        {name: cells for name, cells in may_be_numbers.items() if name not in pairs}, floats, options
    )
    if pairs and notation.get("decimal") == ",":  # other columns show that the comma is a decimal point
        as_numbers, notation, notes = _find_notation(may_be_numbers, floats, options)
    updates |= notation
    lines += notes
    rest = {name: cells for name, cells in texts.items() if name not in as_numbers}
    numbers = [name for name in rest if stated.get(name) == "numbers"]
    if numbers:
        updates["types"] = dict.fromkeys(numbers, "double") | options.types
    rest = {name: cells for name, cells in rest.items() if stated.get(name, "lists") == "lists"}
    lists = {name: separator for name, cells in rest.items() if (separator := _list_separator(cells)) is not None}
    for name in rest:
        if stated.get(name) == "lists" and name not in lists:
            lists[name] = _any_separator(rest[name], name, uri)
    if lists:
        updates["lists"] = lists | options.lists
    for name, separator in lists.items():
        lines.append(f"{name!r} has lists: {'as JSON' if separator == JSON else f'items separated by {separator!r}'}")
    if maybe_decimals := [name for name in pairs if name in lists]:
        columns = ", ".join(maybe_decimals)
        lines.append(f"if the comma is a decimal point in {columns}, run the command again with --decimal ,")
    for name, cells in rest.items():
        if name not in lists and (note := _mostly_numbers(cells)) is not None:
            if layout.header and pc.any(pc.equal(cells, name)).as_py():
                problem = f"a cell of the column is its name, {name!r}: were files written one after the other?"
                raise DataError(problem, file=uri, column=name, fix="remove lines that repeat the names of the columns")
            lines.append(f"{name!r}: {note}")
    return options.model_copy(update=updates), lines


def _first_texts(reader: Csv, uri: str) -> tuple[dict[str, pa.Array], dict[str, pa.Array]]:
    """The first cells, without nulls, of each column of texts, and of each column of numbers with a decimal point."""
    schema = reader.schema(uri)
    names = [c.name for c in schema if pat.is_string(c.type) or pat.is_floating(c.type)]
    names = [name for name in names if name not in reader.reading.options.lists]
    batch = next(reader.batches(uri, pa.schema([(name, pa.string()) for name in names])), None) if names else None
    if batch is None:
        return {}, {}
    cells = {name: pc.utf8_trim_whitespace(batch.column(name).drop_null()) for name in names}
    is_text = {name: pat.is_string(schema.field(name).type) for name in names}
    return {name: cells[name] for name in names if is_text[name]}, {
        name: cells[name] for name in names if not is_text[name]
    }


def _find_notation(
    texts: dict[str, pa.Array], floats: dict[str, pa.Array], options: TextOptions
) -> tuple[list[str], dict[str, Any], list[str]]:
    """How numbers are written that have a decimal comma or characters between thousands.

    Args:
        texts: columns of texts.
        floats: columns of numbers with a decimal point.

    Returns:
        the columns of texts that are numbers; the options to set; lines for the user.
    """
    if options.thousands is not None:
        return [], {}, []
    allowed = [pair for pair in _NOTATIONS if "decimal" not in options.model_fields_set or pair[0] == options.decimal]
    fitting = {name: [pair for pair in allowed if _has_notation(cells, *pair)] for name, cells in texts.items()}
    fitting = {name: pairs for name, pairs in fitting.items() if pairs}
    if not fitting:
        return [], {}, _maybe_thousands(floats)
    columns = ", ".join(fitting)
    common = [pair for pair in allowed if all(_is_written(texts[name], *pair) for name in fitting)]
    both = [pair for pair in common if all(_is_written(cells, *pair) for cells in floats.values())]
    if not both:
        problem = "differ in their decimal points or in the characters between thousands, so that they are texts"
        others = "" if common else " among each other"
        others = others or f" from the numbers of {', '.join(floats)}"
        return [], {}, [f"numbers of {columns} {problem}{others}; write them alike, or set --decimal and --thousands"]
    decimal, thousands = both[0]
    updates = {"decimal": decimal} if decimal != options.decimal else {}
    lines = [f"numbers have {decimal!r} as the decimal point: {columns}"] if updates else []
    if thousands is not None:
        updates["thousands"] = thousands
        numbers = {name: texts[name] for name in fitting} | floats
        grouped = [name for name, cells in numbers.items() if len(cells) and _share(cells, re.escape(thousands)) > 0]
        lines.append(f"numbers have {thousands!r} between thousands: {', '.join(grouped)}")
    if both[:2] == [(".", ","), (",", None)]:
        lines.append("1,204 is read as 1204; if the comma is a decimal point, run the command again with --decimal ,")
    return list(fitting), updates, lines


def _has_notation(cells: pa.Array, decimal: str, thousands: str | None) -> bool:
    """Whether cells show a notation: all fit it, and some are numbers only with it."""
    marks = [re.escape(mark) for mark in (thousands, "," if decimal == "," else None) if mark is not None]
    return len(cells) >= _ENOUGH and _share(cells, "|".join(marks)) > 0 and _is_written(cells, decimal, thousands)


def _is_written(cells: pa.Array, decimal: str, thousands: str | None) -> bool:
    whole = "[0-9]+"
    if thousands is not None:
        whole = rf"([1-9][0-9]{{0,2}}({re.escape(thousands)}[0-9]{{3}})+|[0-9]{{1,3}})"
    return not len(cells) or _share(cells, rf"^[-+]?{whole}({re.escape(decimal)}[0-9]+)?$") == 1


def _may_be_pairs(cells: pa.Array, options: TextOptions) -> bool:
    """Whether cells of a file that is separated by commas may be lists like `2,5` rather than numbers.

    Numbers with two decimals or more have a zero after the comma now and then; ids do not begin with zeros. Numbers
    like `2,992` have three digits after each comma, and fewer before the first one now and then.
    """
    if "decimal" in options.model_fields_set or not _has_notation(cells, ",", None):
        return False
    if _is_written(cells, ".", ",") and _share(cells, "^[-+]?[0-9]{1,2},") > 0:
        return False
    return _list_separator(cells) == "," and _share(cells, ",0[0-9]") == 0


def _maybe_thousands(floats: dict[str, pa.Array]) -> list[str]:
    """A question for numbers like 1.234, where the point may be between thousands."""
    names = [name for name, cells in floats.items() if len(cells) >= _ENOUGH and _share(cells, _THREE_DECIMALS) == 1]
    if not names:
        return []
    asked = (
        "the point is read as the decimal point; if it is between thousands, run the command again with --thousands ."
    )
    return [f"all numbers with a point have three digits after it: {', '.join(names)}. {asked} --decimal ,"]


def _list_separator(cells: pa.Array) -> str | None:
    """The separator of the items, or None if the cells hold no lists.

    A separator makes items of a column if it is in a fifth of the cells, and the cells have at least twice as many
    different values as their items: texts do not repeat their parts so often.
    """
    if len(cells) < _ENOUGH:
        return None
    if _share(cells, _LIST) >= _NEARLY_ALL and _are_lists(cells):
        return JSON
    distinct_cells = len(pc.unique(cells))
    for separator in (*_SEPARATORS, *_ID_SEPARATORS):
        if _share(cells, re.escape(separator)) < 0.2:
            continue
        items = pc.unique(pc.list_flatten(list_parser(pa.list_(pa.string()), separator)(cells)))
        if not len(items) or 2 * len(items) > distinct_cells:
            continue
        if separator not in _ID_SEPARATORS or (_share(items, _ID_ITEM) >= _NEARLY_ALL and _varies(cells, separator)):
            return separator
    return None


def _varies(cells: pa.Array, separator: str) -> bool:
    """Whether the number of items varies; `5 12 2001` may be a date."""
    return len(pc.unique(pc.count_substring(cells, separator))) > 1


def _are_lists(cells: pa.Array) -> bool:
    """Whether the first cells are lists as JSON or Python writes them. The time of a log is in brackets, too."""
    try:
        list_parser(pa.list_(pa.string()), JSON)(cells[:_ENOUGH])
    except CellError:
        return False
    return True


def _stated(roles: StatedRoles, columns: Sequence[str]) -> dict[str, StatedRole]:
    """The stated role of columns of a file. Ignores other names, because folders are columns too."""
    of_file = {
        role: [name for text in texts for name in names_in(text, columns) if name in columns]
        for role, texts in roles.items()
    }
    return roles_by_column(of_file, columns)


def _any_separator(cells: pa.Array, column: str, uri: str) -> str:
    """The separator that most cells have, for cells that are stated to be lists."""
    if len(cells) and _share(cells, _LIST) > 0.5:
        return JSON
    shares = {separator: _share(cells, re.escape(separator)) for separator in _SEPARATORS} if len(cells) else {}
    separator = max(shares, key=lambda text: shares[text], default=None)
    if separator is None or not shares[separator]:
        problem = f"--lists {column}: no cell has one of the separators {' '.join(map(repr, _SEPARATORS))}"
        value = repr(cells[0].as_py()) if len(cells) else None
        fix = f"say what separates the items: --list '{column}=SEPARATOR'"
        raise DataError(problem, file=uri, column=column, value=value, fix=fix)
    return separator


def _mostly_numbers(cells: pa.Array) -> str | None:
    """A note about a column in which nearly all cells are numbers."""
    if len(cells) < _ENOUGH:
        return None
    is_number = pc.match_substring_regex(cells, NUMBER)
    count = pc.sum(is_number).as_py()
    if not _MOSTLY * len(cells) <= count < len(cells):
        if _share(cells, _WITH_UNIT) < _NEARLY_ALL:
            return None
        return f"numbers with a unit, as in {cells[0].as_py()!r}, are texts; to use them as numbers, write them without"
    others = [f"'{value}'" for value in pc.unique(cells.filter(pc.invert(is_number))).to_pylist()[:3]]
    note = f"{count:,} of {len(cells):,} are numbers; the others: {', '.join(others)}"
    return f"{note}. If these are nulls, run the command again with {' '.join(f'--null {text}' for text in others)}"


def _share(cells: pa.Array, pattern: str) -> float:
    return float(pc.mean(pc.match_substring_regex(cells, pattern).cast(pa.int8())).as_py())
