"""What the user says that columns are: `--ids`, `--numbers`, `--lists` and `--ignore` of `rayrec init`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, floats_of, is_list, is_text, shown, without_views
from rayrec.data.arrays.lists import row_of, unnest
from rayrec.data.formats.text_cells import NUMBER
from rayrec.storage.errors import DataError, suggestion

StatedRole = Literal["ids", "numbers", "lists", "ignore"]
StatedRoles = Mapping[StatedRole, Collection[str]]
"""Columns by what they are: ids or lists of ids, numbers, lists of ids, or unused. A text may name several columns,
separated by commas."""

Booleans = npt.NDArray[np.bool_]


def names_in(text: str, columns: Sequence[str]) -> list[str]:
    """The names in the value of an option, separated by commas. The name of a column may contain commas."""
    return [text] if text in columns else [name if name in columns else name.strip() for name in text.split(",")]


def columns_of(option: str, texts: Collection[str], columns: Sequence[str]) -> Iterator[str]:
    """The columns that the values of an option name.

    Raises:
        DataError: an unknown column.
    """
    for text in texts:
        for name in names_in(text, columns):
            if name not in columns:
                hint = suggestion(name, columns)
                problem = f"--{option} {text}: there is no column {name!r}{hint}"
                raise DataError(problem, fix="name a column of the files")
            yield name


def roles_by_column(stated: StatedRoles, columns: Sequence[str], keep: Collection[str] = ()) -> dict[str, StatedRole]:
    """The stated role of each column that has one.

    Args:
        keep: columns of `--keep`.

    Raises:
        DataError: an unknown column, one with two roles, or one that is both kept and ignored.
    """
    roles: dict[str, StatedRole] = {}
    for role, texts in stated.items():
        for column in columns_of(role, texts, columns):
            if roles.setdefault(column, role) != role:
                _refuse(column, f"both --{roles[column]} and --{role} name this column")
            if role == "ignore" and column in keep:
                _refuse(column, "both --keep and --ignore name this column")
    return roles


def _refuse(column: str, problem: str) -> None:
    raise DataError(problem, column=column, fix="leave it out of one of them")


def refuse_used(roles: Mapping[str, StatedRole], labels: Collection[str], time: str | None) -> None:
    """Refuses a role for a label or for the time of the rows.

    Raises:
        DataError: a stated column is one of them.
    """
    uses = [(label, "a label", "label") for label in labels] + (
        [(time, "the time of the rows", "time")] if time else []
    )
    for column, use, option in uses:
        if column in roles:
            fix = f"leave it out of --{roles[column]}, or name another column with --{option}"
            raise DataError(f"--{roles[column]} names {use}", column=column, fix=fix)


def first_wrong(array: pa.Array, role: StatedRole) -> tuple[int, DataError] | None:
    """The first row with a value that cannot have the stated role, and the error; None if all can."""
    array = decoded(array.cast(without_views(array.type)))
    kind = array.type
    leaf = kind.value_type if is_list(kind) else kind
    leaf = leaf.value_type if pat.is_dictionary(leaf) else leaf
    if role == "ignore" or not len(array) or pat.is_null(kind):
        return None
    filled = np.flatnonzero(_true(array.is_valid()))
    first = int(filled[0]) if len(filled) else 0

    def wrong(row: int, problem: str, fix: str) -> tuple[int, DataError]:
        return row, DataError(problem, value=shown(array, row, repr), fix=fix)

    if role in ("ids", "lists"):
        if role == "lists" and not is_list(kind):
            fix = "write lists; in text files, say what separates the items: --list COLUMN=SEPARATOR"
            return wrong(first, f"the column has type {kind}, not a list", fix)
        pairs = pat.is_struct(leaf) and {field.name for field in leaf.fields} == {"id", "weight"}
        if is_text(leaf) or pat.is_integer(leaf) or (is_list(kind) and pairs):
            return None
        fix = "write integers or texts; in text files, --type COLUMN=string reads texts"
        return wrong(first, f"ids are integers or texts; the column has type {kind}", fix)
    if is_text(kind):
        texts = array.cast(pa.large_binary()).cast(pa.large_string(), safe=False)
        others = np.flatnonzero(_true(pc.invert(pc.match_substring_regex(texts, NUMBER))))
        fix = "write numbers, and nulls where there is none; in text files, --null TEXT names a null"
        return wrong(int(others[0] if len(others) else first), f"the column has type {kind}, not numbers", fix)
    if not (pat.is_integer(leaf) or pat.is_floating(leaf) or pat.is_decimal(leaf) or pat.is_boolean(leaf)):
        return wrong(first, f"the column has type {kind}, not numbers", "convert it to numbers")
    if not is_list(kind):
        infinite = np.flatnonzero(~np.isfinite(floats_of(array)) & _true(array.is_valid()))
        return wrong(int(infinite[0]), "the number is not finite", "write a null instead") if len(infinite) else None
    lists = unnest(array)
    lengths = np.diff(lists.offsets)
    others = filled[(lengths[filled] != lengths[first]) | (lengths[filled] == 0)]
    if len(others):
        return wrong(int(others[0]), "a list of numbers has the same length, from 1, in all rows", "pad the lists")
    infinite = np.flatnonzero(~np.isfinite(floats_of(lists.leaf)))
    if not len(infinite):
        return None
    row = int(row_of(lists.offsets, infinite[:1])[0])
    return wrong(row, "a number of the list is null or not finite", "write finite numbers")


def _true(array: pa.Array) -> Booleans:
    """[n], False for nulls."""
    values: Booleans = array.fill_null(False).to_numpy(zero_copy_only=False)
    return values
