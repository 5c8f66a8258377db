"""What the first lines of a CSV file show: whether the first one holds names, and whether spaces follow delimiters."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import pyarrow as pa

_LOOK_BYTES = 1 << 18
_LOOK_LINES = 1000
_VALUE = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|\d{4}-\d\d-\d\d\b.*")


@dataclass(frozen=True, slots=True)
class Look:
    """What is known of a CSV file before it is read.

    Args:
        columns: their names, `c0`, `c1`, … without a header; empty where no line could be looked at.
        header: whether the first line holds the names.
        padded: columns whose texts all begin with a space.
    """

    columns: list[str]
    header: bool
    padded: frozenset[str]


def look(stream: pa.NativeFile, delimiter: str, header: bool | None) -> Look:
    """Looks at the first lines.

    A first line with a number or a date among its cells holds data: columns are not named so. The same is true of one
    of which half of the cells come again below, in their column, where names do not come.

    Args:
        header: what the user says, if he does.
    """
    lines = _lines(stream, delimiter)
    if not lines:
        return Look([], header is not False, frozenset())
    first, below = lines[0], lines[1:]
    if header is None:
        named = not any(_VALUE.fullmatch(cell.strip()) for cell in first)
        header = named and 2 * _coming_again(first, below) < len(first)
    columns = first if header else [f"c{at}" for at in range(len(first))]
    rows = below if header else lines
    padded = (name for at, name in enumerate(columns) if _padded([row[at] for row in rows if at < len(row)]))
    return Look(columns, header, frozenset(padded))


def _lines(stream: pa.NativeFile, delimiter: str) -> list[list[str]]:
    """The cells of the first lines, all of them whole."""
    data = stream.read(_LOOK_BYTES)
    text = data.decode("utf-8-sig", errors="replace")
    if len(data) == _LOOK_BYTES:
        text = text[: text.rfind("\n") + 1]
    try:
        return [line for line in islice(csv.reader(io.StringIO(text), delimiter=delimiter), _LOOK_LINES) if line]
    except csv.Error:  # a cell too long for Python's reader
        return []


def _coming_again(first: Sequence[str], below: Sequence[Sequence[str]]) -> int:
    return sum(
        bool(cell) and any(at < len(line) and line[at] == cell for line in below) for at, cell in enumerate(first)
    )


def _padded(cells: Sequence[str]) -> bool:
    return any(cells) and all(cell.startswith(" ") for cell in cells if cell)
