"""`rayrec init`: finds out how text files are written, so that the config says it and nothing is guessed twice."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.formats.convert import reader_of
from rayrec.data.formats.text_cells import JSON, NUMBER
from rayrec.data.formats.text_files import Csv
from rayrec.data.formats.text_options import TextOptions, text_reading
from rayrec.data.tools.init.stated_roles import StatedRole, StatedRoles, names_in, roles_by_column
from rayrec.storage.errors import DataError

_SEPARATORS = ("|", "^", ";", ", ", ",")
_LIST = r"^\s*\[.*\]\s*$"
_THOUSANDS = r"^[-+]?[0-9]{1,3}(,[0-9]{3})*(\.[0-9]+)?$"
_ENOUGH = 100  # cells
_NEARLY_ALL = 0.95


def find_text_options(uris: Sequence[str], roles: StatedRoles | None = None) -> tuple[TextOptions, list[str]]:
    """The options for the files, with what the user says, and lines for the user about what was found.

    Looks at the first file that is CSV: separator, encoding, header, lists in cells, characters between thousands, and
    columns of numbers with some other words.

    Args:
        roles: stated roles. Texts that are stated to be numbers are read as numbers, and those that are stated to be
            lists are divided by the separator that most of them have.

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
    lines = [
        f"{uri}: {len(layout.columns)} columns separated by {layout.separator!r}, {layout.encoding}, "
        f"{'names in the first line' if layout.header else 'no header line'}"
    ]
    texts = {name: cells for name, cells in _first_texts(reader, uri).items() if name not in options.types}
    with_thousands = [name for name, cells in texts.items() if options.thousands is None and _has_thousands(cells)]
    if with_thousands:
        updates["thousands"] = ","
        lines.append(f"numbers have ',' between thousands: {', '.join(with_thousands)}")
    rest = {name: cells for name, cells in texts.items() if name not in {*options.lists, *options.times}}
    rest = {name: cells for name, cells in rest.items() if name not in with_thousands}
    stated = _stated(roles or {}, layout.columns)
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
    for name, cells in rest.items():
        if name not in lists and (note := _mostly_numbers(cells)) is not None:
            lines.append(f"{name!r}: {note}")
    return options.model_copy(update=updates), lines


def _first_texts(reader: Csv, uri: str) -> dict[str, pa.Array]:
    """The first cells of each column of texts, without nulls."""
    schema = reader.schema(uri)
    names = [column.name for column in schema if pat.is_string(column.type)]
    if not names:
        return {}
    batch = next(reader.batches(uri, pa.schema([schema.field(name) for name in names])), None)
    if batch is None:
        return {}
    return {name: pc.utf8_trim_whitespace(batch.column(name).drop_null()) for name in names}


def _list_separator(cells: pa.Array) -> str | None:
    """The separator of the items, or None if the cells hold no lists.

    A separator makes items of a column if it is in a fifth of the cells, and the cells have at least twice as many
    different values as their items: texts do not repeat their parts so often.
    """
    if len(cells) < _ENOUGH:
        return None
    if _share(cells, _LIST) >= _NEARLY_ALL:
        return JSON
    distinct_cells = len(pc.unique(cells))
    for separator in _SEPARATORS:
        if _share(cells, re.escape(separator)) < 0.2:
            continue
        items = pc.unique(pc.utf8_trim_whitespace(pc.list_flatten(pc.split_pattern(cells, separator))))
        if 2 * len(items) <= distinct_cells:
            return separator
    return None


def _stated(roles: StatedRoles, columns: Sequence[str]) -> dict[str, StatedRole]:
    """The stated role of columns of a file. Other names are no error here: folders are columns, too."""
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


def _has_thousands(cells: pa.Array) -> bool:
    return len(cells) >= _ENOUGH and _share(cells, _THOUSANDS) == 1 and _share(cells, ",") > 0


def _mostly_numbers(cells: pa.Array) -> str | None:
    """A note about a column in which nearly all cells are numbers."""
    if len(cells) < _ENOUGH:
        return None
    is_number = pc.match_substring_regex(cells, NUMBER)
    count = pc.sum(is_number).as_py()
    if not _NEARLY_ALL * len(cells) <= count < len(cells):
        return None
    others = [f"'{value}'" for value in pc.unique(cells.filter(pc.invert(is_number))).to_pylist()[:3]]
    note = f"{count:,} of {len(cells):,} are numbers; the others: {', '.join(others)}"
    return f"{note}. If these are nulls, run the command again with {' '.join(f'--null {text}' for text in others)}"


def _share(cells: pa.Array, pattern: str) -> float:
    return float(pc.mean(pc.match_substring_regex(cells, pattern).cast(pa.int8())).as_py())
