"""Finds list columns that look like a sequence: adjacent columns with equal lengths in every row."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rayrec.data.tools.init.column_facts import ColumnFacts, time_unit

# Role of a column to the kind of its list.
VALUES = {"time_list": "time", "number_list": "number"}
_TIME_WORDS = ("at", "time", "times", "ts", "timestamp", "timestamps", "date", "datetime")
_NUMBERS = re.compile(r"list<\w+: (u?int\d+|float|double|halffloat)\b")
_LARGEST = float(np.finfo(np.float32).max)


def in_sequences(columns: Sequence[ColumnFacts]) -> list[ColumnFacts]:
    """Sets `sequence` and the role of columns that form a sequence: at least two, with ids among them."""
    result: list[ColumnFacts] = []
    count = 0
    for run in _runs(columns):
        if len(run) < 2 or "id_list" not in map(_role, run):
            result += run
            continue
        count += 1
        name = f"sequence_{count}"
        note = f"part of {name!r}: as long as its neighbors in every row"
        result += [replace(column, role=_role(column) or "", sequence=name, note=note) for column in run]
    return result


def _role(column: ColumnFacts) -> str | None:
    """The role in a sequence; None if the column cannot be part of one."""
    if column.lengths is None or not np.ptp(column.lengths):
        return None
    if "list<" in column.kind and ": timestamp" in column.kind:
        return "time_list"
    low, high = column.low or 0.0, column.high or 0.0
    if column.role == "id_list":
        has_time_name = column.name.lower().split("_")[-1] in _TIME_WORDS
        return "time_list" if has_time_name and time_unit(low, high) else "id_list"
    return "number_list" if _NUMBERS.search(column.kind) and low >= -_LARGEST and high <= _LARGEST else None


def _runs(columns: Sequence[ColumnFacts]) -> Iterator[list[ColumnFacts]]:
    """Yields runs of adjacent columns with equal lengths in every row."""
    run: list[ColumnFacts] = []
    for column in columns:
        if run and not (_role(run[-1]) and _role(column) and np.array_equal(run[-1].lengths, column.lengths)):  # type: ignore[arg-type]
            yield run
            run = []
        run.append(column)
    if run:
        yield run
