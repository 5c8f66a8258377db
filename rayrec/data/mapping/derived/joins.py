"""Derived columns of tables beside the rows: the values of each row's key, as of the row's time."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.types as pat

from rayrec.data.arrays.arrow_types import decoded, int64_of, is_list, is_text, leaf_of, nulls_of, shown
from rayrec.data.arrays.buffers import I64, Mask
from rayrec.data.arrays.lists import Lists, row_of, unnest
from rayrec.data.mapping.derived.lists import either, relisted
from rayrec.data.mapping.derived.scalars import instants
from rayrec.data.mapping.derived.specs import Entity, Events
from rayrec.data.mapping.entities import EntitySource, EntityTable, open_entities
from rayrec.data.mapping.problems import Problems
from rayrec.storage.errors import DataError

Joined = Entity | Events
# The events of the last rows of each thread: the lists of a sequence are columns of the same events.
_LAST = threading.local()


def source_of(spec: Joined) -> EntitySource:
    """The table of a derived column."""
    if isinstance(spec, Entity):
        return EntitySource(spec.path, spec.key, spec.valid_from, spec.unit)
    where = tuple((name, tuple(values)) for name, values in sorted(spec.where.items()))
    return EntitySource(spec.path, spec.key, spec.time, spec.unit, True, where)


def write_entities(derived: Sequence[dict[str, Any]], folder: Path) -> None:
    """Writes the tables that derived columns read into `folder`, and their new paths into the JSON of the columns."""
    tables: dict[EntitySource, list[str]] = {}
    kinds: dict[str, type[Joined]] = {"entity": Entity, "events": Events}
    specs = [(raw, kinds[raw["kind"]](**raw)) for raw in derived if raw["kind"] in kinds]
    for _, spec in specs:
        tables.setdefault(source_of(spec), []).append(spec.take)
    paths = {source: f"entities/{number}" for number, source in enumerate(tables)}
    for source, columns in tables.items():
        open_entities(source).write(folder / paths[source], list(dict.fromkeys(columns)))
    for raw, spec in specs:
        raw["path"] = paths[source_of(spec)]


def entity(spec: Entity, arrays: list[pa.Array], problems: Problems) -> pa.Array:
    """The values of the rows' keys. Lists of keys become lists of values."""
    table, keys = open_entities(source_of(spec)), arrays[0]
    _check(spec, table, arrays)
    times = nulls = None
    if spec.at is not None:
        times, nulls = _times_of_rows(spec, spec.at, arrays[1], problems)
    if not is_list(keys.type):
        rows = np.arange(len(keys))
        return _values(spec, table, keys, rows, times, nulls, problems)
    lists = unnest(keys)
    rows = row_of(lists.offsets, np.arange(len(lists.leaf)))
    return relisted(lists, _values(spec, table, lists.leaf, rows, times, nulls, problems))


def events(spec: Events, arrays: list[pa.Array], problems: Problems) -> pa.Array:
    """A list for each row: of its key's last events before its time. Null for a null key or time."""
    table, keys = open_entities(source_of(spec)), decoded(arrays[0])
    _check(spec, table, arrays)
    if is_list(keys.type):
        fix = "give a column of single keys"
        raise DataError(f"derived column {spec.name!r}: a row has the events of one key", column=spec.column, fix=fix)
    kept, wanted = getattr(_LAST, "kept", None), (source_of(spec), spec.last)
    if kept is None or kept[0] != wanted or any(of() is not array for of, array in zip(kept[1], arrays, strict=True)):
        times, unknown_times = _times_of_rows(spec, spec.at, arrays[1], problems)
        nulls = either(nulls_of(keys), unknown_times)
        if nulls is not None:
            times = np.where(nulls, 0, times)  # nothing is earlier than 1970
        positions, offsets = table.last(_ids(table, keys), times, spec.last)
        kept = _LAST.kept = (wanted, [*map(weakref.ref, arrays)], positions, Lists(pa.nulls(0), offsets, nulls))
        weakref.finalize(arrays[0], _LAST.__dict__.clear)
    return relisted(kept[3], table.values(spec.take, kept[2]))


def _ids(table: EntityTable, keys: pa.Array) -> I64 | pa.Array:
    """Keys as the table finds them; any id for a null."""
    if pat.is_null(keys.type):
        return np.zeros(len(keys), np.int64)
    return keys if table.text else int64_of(keys.fill_null(0) if keys.null_count else keys)


def _times_of_rows(spec: Joined, at: str, array: pa.Array, problems: Problems) -> tuple[I64, Mask | None]:
    """[n] µs since 1970 of the rows, and the mask of rows without a time."""
    times = instants(spec, at, array, problems, lambda positions: positions)
    return times.cast(pa.int64()).fill_null(0).to_numpy(), nulls_of(times)


def _check(spec: Joined, table: EntityTable, arrays: list[pa.Array]) -> None:
    name = f"derived column {spec.name!r}"
    kind = leaf_of(arrays[0].type)
    kind = kind.value_type if pat.is_dictionary(kind) else kind
    has_text = is_text(kind)
    if not (pat.is_null(kind) or has_text or pat.is_integer(kind)):
        fix = "cast the column, or the keys of the table"
        raise DataError(f"{name}: a key is an integer or a string, not {kind}", column=spec.column, fix=fix)
    if not pat.is_null(kind) and has_text != table.text:
        here, there = ("strings", "integers") if has_text else ("integers", "strings")
        raise DataError(
            f'{name}: the rows\' keys are {here}, those of {spec.path} are {there}: 7 and "7" are different keys',
            column=spec.column,
            fix=f"cast the column {spec.key!r} of the table to the type of the rows' column",
        )
    if is_list(arrays[0].type) and is_list(arrays[0].type.value_type):
        raise DataError(f"{name}: keys are single ids or lists of ids, not lists of lists", column=spec.column)
    if is_list(arrays[0].type) and is_list(table.column(spec.take).type):
        raise DataError(
            f"{name}: {spec.take!r} has a list for each key, so a list of keys would have lists of lists",
            column=spec.column,
            fix="take a column of single values, or give a column of single keys",
        )
    if spec.at is not None and pat.is_timestamp(arrays[1].type) and table.zoned is not None:
        zoned = arrays[1].type.tz is not None
        if zoned != table.zoned:
            first, second = ("rows", "entities") if zoned else ("entities", "rows")
            raise DataError(
                f"{name}: times of the {first} have a time zone, times of the {second} have none, so that versions "
                "could be wrong by hours",
                column=spec.at,
                fix="write both with their time zone, or both without one",
            )


def _values(
    spec: Entity,
    table: EntityTable,
    keys: pa.Array,
    rows: I64,
    times: I64 | None,
    unknown_times: Mask | None,
    problems: Problems,
) -> pa.Array:
    """The value of each key; null for a null key, and for a row without a time.

    Args:
        rows: [n], the row of each key.
        times: [number of rows], µs since 1970.
        unknown_times: [number of rows], True for rows without a time.
    """
    keys = decoded(keys)
    nulls = nulls_of(keys)
    versions = table.versions(_ids(table, keys), None if times is None else times[rows])
    known = np.ones(len(keys), np.bool_) if nulls is None else ~nulls
    if unknown_times is not None:
        known &= ~unknown_times[rows]
    versions = np.where(known, versions, -1)
    missing = np.flatnonzero((versions < 0) & known)
    if len(missing) and spec.on_missing == "error":
        valid = "" if spec.at is None else f" at the time of the row ({spec.at!r})"
        problem = f"derived column {spec.name!r}: {spec.path} has no entity with this key{valid}"
        fix = 'add it to the table, or set on_missing: "null" and `on_null` or `default` of the features'
        problems.add(rows[missing], spec.column, problem, fix, lambda k: shown(keys, int(missing[k])))
    return table.values(spec.take, versions)
