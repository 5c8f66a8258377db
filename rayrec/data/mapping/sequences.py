"""Sequences: list columns that belong together, position by position.

Their ids are sparse features (`schema.sparse`), mapped by `sparse.py` as any others; here are the description of a
sequence, its lists of times and numbers, and the checks that all of its lists have one length a row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import Field

from rayrec.data.arrays.arrow_types import floats_of, is_list, nulls_of, seconds_of
from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.lists import Lists, row_of, truncate, unnest
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Ids
from rayrec.data.strict import Strict

End = Literal["first", "last"]


class SequenceValues(Strict):
    """A list of times or numbers in a sequence.

    Args:
        name: in `Batch.sequences[...].values`.
        column: the list column; the name where none is given.
        kind: "time" (whole seconds since 1970, int64) or "number" (float32).
        unit: of integers that are times; Arrow's timestamps have units of their own.
    """

    name: str = Field(min_length=1)
    column: str | None = None
    kind: Literal["time", "number"] = "number"
    unit: Literal["s", "ms", "us", "ns"] = "s"

    @property
    def column_name(self) -> str:
        """The column that is read."""
        return self.column or self.name


class SequenceColumns(Strict):
    """List columns of one length a row: position i of each says something of the same event.

    Args:
        name: in `Batch.sequences`.
        ids: features of `schema.sparse`, of kind `id_list`, which this sequence is made of.
        values: lists of times and numbers beside them.
        length: longest list kept, in place of the features' own `max_length`; None: all.
        keep: which end of a longer list is kept, once it is oldest first.
        order: of the lists in the files; batches hold them oldest first.
    """

    name: str = Field(min_length=1)
    ids: list[str] = Field(min_length=1)
    values: list[SequenceValues] = Field(default=[])
    length: int | None = Field(default=None, ge=1)
    keep: End = "last"
    order: Literal["oldest_first", "newest_first"] = "oldest_first"

    @property
    def keep_in_file(self) -> End:
        """Which end of the lists, as they are stored, is kept."""
        if self.order == "oldest_first":
            return self.keep
        return "first" if self.keep == "last" else "last"


def in_order(bags: Ids, sequence: SequenceColumns) -> Ids:
    """A feature's bags, oldest first."""
    if sequence.order == "oldest_first" or bags.offsets is None:
        return bags
    row = np.repeat(np.arange(len(bags.offsets) - 1), np.diff(bags.offsets))
    turned = bags.offsets[row] + bags.offsets[row + 1] - 1 - np.arange(bags.offsets[0], bags.offsets[-1])
    return Ids(bags.values[turned], bags.offsets - bags.offsets[0], None)


def map_values(sequence: SequenceColumns, columns: Mapping[str, pa.Array], problems: Problems) -> list[Ids]:
    """The sequence's times and numbers, cut as its ids are. Bad rows are noted in `problems`."""
    return [in_order(_mapped(sequence, one, columns[one.column_name], problems), sequence) for one in sequence.values]


def check_lengths(
    sequence: SequenceColumns,
    columns: Mapping[str, pa.Array],
    column_of: Mapping[str, str],
    mapped: Mapping[str, I64],
    problems: Problems,
) -> None:
    """Notes rows whose lists are not all of one length.

    Args:
        column_of: the column of each id feature.
        mapped: offsets of each id feature after mapping: one that leaves out ids no longer fits the others.
    """
    first = sequence.ids[0]
    wanted = np.diff(unnest(columns[column_of[first]]).offsets)
    others = [column_of[name] for name in sequence.ids[1:]] + [one.column_name for one in sequence.values]
    for column in others:
        _compare(sequence, column, np.diff(unnest(columns[column]).offsets), wanted, column_of[first], problems)
    kept = wanted if sequence.length is None else np.minimum(wanted, sequence.length)
    for name in sequence.ids:
        _compare(sequence, column_of[name], np.diff(mapped[name]), kept, f"{column_of[first]}, as read", problems)


def _compare(sequence: SequenceColumns, column: str, found: I64, wanted: I64, of: str, problems: Problems) -> None:
    bad = np.flatnonzero(found != wanted)
    problems.add(
        bad,
        column,
        f"sequence {sequence.name!r}: the lists have unequal lengths",
        "write a value for each position in every list of the sequence, and fill null ids (`default`) rather than "
        "leave them out",
        lambda k: f"{found[bad[k]]} in {column}, {wanted[bad[k]]} in {of}",
    )


def check_value_type(one: SequenceValues, found: pa.DataType) -> str | None:
    """What is wanted of a column, where it is not that."""
    inner = found.value_type if is_list(found) else None
    number = inner is not None and (pa.types.is_integer(inner) or pa.types.is_floating(inner))
    if one.kind == "number":
        return None if number else "a list of numbers"
    fits = inner is not None and (pa.types.is_integer(inner) or pa.types.is_timestamp(inner))
    return None if fits else "a list of timestamps or integers"


def _mapped(sequence: SequenceColumns, one: SequenceValues, array: pa.Array, problems: Problems) -> Ids:
    lists = unnest(array)
    offsets, leaf = lists.offsets, lists.leaf
    values = seconds_of(leaf, one.unit) if one.kind == "time" else _numbers(one, lists, problems)
    if (nulls := nulls_of(leaf)) is not None:
        bad, fix = row_of(offsets, np.flatnonzero(nulls)), "fill the nulls, or leave the event out of every list"
        problems.add(bad, one.column_name, f"sequence {sequence.name!r} holds a null", f"{fix} of the sequence")
    if sequence.length is not None and (cut := truncate(offsets, sequence.length, sequence.keep_in_file)) is not None:
        positions, offsets = cut
        values = values[positions]
    return Ids(values, offsets)


def _numbers(one: SequenceValues, lists: Lists, problems: Problems) -> npt.NDArray[np.float32]:
    wide = floats_of(lists.leaf.fill_null(0))
    with np.errstate(over="ignore"):
        values = wide.astype(np.float32)
    bad = np.flatnonzero(~np.isfinite(values))
    problem = f"list {one.name!r} holds a number that is not a finite float32"
    fix = "write a finite number for every position"
    problems.add(row_of(lists.offsets, bad), one.column_name, problem, fix, lambda k: str(wide[bad[k]]))
    return np.nan_to_num(values, copy=False, posinf=0, neginf=0)
