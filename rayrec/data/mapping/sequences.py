"""Sequences: list columns aligned by position, e.g. the items and times of a user's history.

The ids of a sequence are sparse features and are mapped by `sparse.py`. This module describes sequences in the config,
maps their times and numbers, and checks that the lists of a row have equal lengths.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from rayrec._runtime.strict import Strict
from rayrec.data.arrays.arrow_types import floats_of, impossible_times, is_list, nulls_of, seconds_of, shown
from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.lists import Lists, row_of, truncate, unnest
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Ids

End = Literal["first", "last"]


class SequenceValues(Strict):
    """A list of times or numbers in a sequence.

    Args:
        name: Key in `Batch.sequences[...].values`.
        column: The list column. Default: the name.
        kind: "time" (whole seconds since 1970, int64) or "number" (float32).
        unit: Unit of times given as integers. Arrow timestamps carry their unit.
    """

    name: str = Field(min_length=1)
    column: str | None = None
    kind: Literal["time", "number"] = "number"
    unit: Literal["s", "ms", "us", "ns"] = "s"

    @property
    def column_name(self) -> str:
        """The column to read."""
        return self.column or self.name


class SequenceColumns(Strict):
    """List columns of equal length in each row; position i of every list describes the same event.

    Args:
        name: Key in `Batch.sequences`.
        ids: Features of `schema.sparse`, of kind `id_list`.
        values: Lists of times and numbers of the same events.
        length: Maximum length; replaces the features' `max_length`. Default: no limit.
        keep: End of a longer list that is kept, seen oldest first.
        order: Order of the lists in the files. Batches are always oldest first.
    """

    name: str = Field(min_length=1)
    ids: list[str] = Field(min_length=1)
    values: list[SequenceValues] = Field(default=[])
    length: int | None = Field(default=None, ge=1)
    keep: End = "last"
    order: Literal["oldest_first", "newest_first"] = "oldest_first"

    @property
    def keep_in_file(self) -> End:
        """The end of the stored lists that is kept."""
        if self.order == "oldest_first":
            return self.keep
        return "first" if self.keep == "last" else "last"


def in_order(bags: Ids, sequence: SequenceColumns) -> Ids:
    """The bags of a feature, oldest first."""
    if sequence.order == "oldest_first" or bags.offsets is None:
        return bags
    row = np.repeat(np.arange(len(bags.offsets) - 1), np.diff(bags.offsets))
    reversed_positions = bags.offsets[row] + bags.offsets[row + 1] - 1 - np.arange(bags.offsets[0], bags.offsets[-1])
    return Ids(bags.values[reversed_positions], bags.offsets - bags.offsets[0], None)


def map_values(sequence: SequenceColumns, columns: Mapping[str, pa.Array], problems: Problems) -> list[Ids]:
    """The sequence's times and numbers, truncated like its ids. Adds bad rows to `problems`."""
    mapped = (_mapped(sequence, spec, columns[spec.column_name], problems) for spec in sequence.values)
    return [in_order(values, sequence) for values in mapped]


def check_lengths(
    sequence: SequenceColumns,
    columns: Mapping[str, pa.Array],
    column_of: Mapping[str, str],
    mapped: Mapping[str, I64],
    problems: Problems,
) -> None:
    """Adds rows with lists of different lengths to `problems`.

    Args:
        column_of: the column of each id feature.
        mapped: offsets of each id feature after mapping. A mapping that drops ids breaks the alignment.
    """
    reference = sequence.ids[0]
    lengths = np.diff(unnest(columns[column_of[reference]]).offsets)
    other_columns = [column_of[name] for name in sequence.ids[1:]] + [spec.column_name for spec in sequence.values]
    for column in other_columns:
        _compare(sequence, column, np.diff(unnest(columns[column]).offsets), lengths, column_of[reference], problems)
    mapped_lengths = lengths if sequence.length is None else np.minimum(lengths, sequence.length)
    for name in sequence.ids:
        _compare(
            sequence,
            column_of[name],
            np.diff(mapped[name]),
            mapped_lengths,
            f"{column_of[reference]}, as read",
            problems,
        )


def _compare(
    sequence: SequenceColumns, column: str, lengths: I64, expected: I64, reference: str, problems: Problems
) -> None:
    bad = np.flatnonzero(lengths != expected)
    problems.add(
        bad,
        column,
        f"sequence {sequence.name!r}: the lists have different lengths",
        "give every list of the sequence a value at each position; replace null ids by a `default` instead of dropping "
        "them",
        lambda k: f"{lengths[bad[k]]} in {column}, {expected[bad[k]]} in {reference}",
    )


def check_value_type(spec: SequenceValues, column_type: pa.DataType) -> str | None:
    """The type that a column should have; None if it has it."""
    inner = column_type.value_type if is_list(column_type) else None
    number = inner is not None and (pa.types.is_integer(inner) or pa.types.is_floating(inner))
    if spec.kind == "number":
        return None if number else "a list of numbers"
    fits = inner is not None and (pa.types.is_integer(inner) or pa.types.is_timestamp(inner))
    return None if fits else "a list of timestamps or integers"


def _mapped(sequence: SequenceColumns, spec: SequenceValues, array: pa.Array, problems: Problems) -> Ids:
    lists = unnest(array)
    offsets, leaf = lists.offsets, lists.leaf
    values = seconds_of(leaf, spec.unit) if spec.kind == "time" else _numbers(spec, lists, problems)
    if spec.kind == "time":
        outside = impossible_times(leaf, spec.unit)
        problem = f"sequence {sequence.name!r}: the times of {spec.name!r} must be between 1970 and 2200 in {spec.unit}"
        fix = f"correct the column, or the `unit` of {spec.name!r} (now {spec.unit})"
        rows = row_of(offsets, outside)
        problems.add(rows, spec.column_name, problem, fix, lambda k: shown(leaf, int(outside[k])))
        values[outside] = 0
    if (nulls := nulls_of(leaf)) is not None:
        bad, fix = row_of(offsets, np.flatnonzero(nulls)), "fill the nulls, or remove the event from every list"
        problems.add(bad, spec.column_name, f"sequence {sequence.name!r} contains a null", f"{fix} of the sequence")
    if sequence.length is not None and (cut := truncate(offsets, sequence.length, sequence.keep_in_file)) is not None:
        positions, offsets = cut
        values = values[positions]
    return Ids(values, offsets)


def _numbers(spec: SequenceValues, lists: Lists, problems: Problems) -> npt.NDArray[np.float32]:
    wide = floats_of(lists.leaf.fill_null(0))
    with np.errstate(over="ignore"):
        values = wide.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values))
    problem = f"list {spec.name!r} contains a number that is not a finite float32"
    fix = "write finite numbers"
    problems.add(row_of(lists.offsets, bad), spec.column_name, problem, fix, lambda k: str(wide[bad[k]]))
    return np.nan_to_num(values, copy=False, posinf=0, neginf=0)
