"""Looks at a data set that has no schema yet and proposes one, with table sizes that fit its ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.types as pat

from rayrec.data.errors import DataError
from rayrec.data.mapping.arrow_types import is_list, is_text, without_views
from rayrec.data.mapping.lists import unnest
from rayrec.data.mapping.targets import LATEST_S, UNITS
from rayrec.data.source.filters import Condition, parse_all, rows_that_pass
from rayrec.data.source.footers import Partitioned, nothing_left, with_partition
from rayrec.data.storage.files import find_files
from rayrec.data.storage.opening import open_parquet

LABEL_NAMES = ("label", "click", "clicked", "is_click", "target", "y")
WEIGHT_NAMES = ("weight", "sample_weight", "importance_weight")
TIME_NAMES = ("timestamp", "time", "ts", "date", "datetime", "event_time", "created_at", "unix_time")
SAMPLE_ROWS = 500_000
_FEW = 64  # an integer column of fewer distinct values is taken for a category


@dataclass(frozen=True, slots=True)
class ColumnFacts:
    """One column of the looked-at rows.

    Args:
        kind: its Arrow type.
        role: "label", "dense", "id", "id_list", "weighted_id_list", "timestamp", "sample_weight" or "unused".
        nulls: null rows.
        values: values, those of lists counted one by one.
        distinct: different ids among them; 0 for columns that are not ids.
        ids_estimate: different ids to be expected in the whole data set.
        low, high: smallest and largest number, None for others.
        longest: the longest list, None for columns that are not lists.
        note: why it is not used, or what to look at.
    """

    name: str
    kind: str
    role: str
    nulls: int
    values: int
    distinct: int
    ids_estimate: int
    low: float | None
    high: float | None
    longest: int | None
    note: str = ""

    @property
    def dense_range(self) -> bool:
        """Whether the ids fill most of `[0, high]`, so that they can be rows themselves."""
        return self.low is not None and self.high is not None and self.low >= 0 and self.high < 8 * self.ids_estimate

    @property
    def table_rows(self) -> int:
        """Rows that a table for these ids should have."""
        if self.dense_range and self.high is not None:
            return int(self.high) + 1
        return max(16, 1 << (2 * self.ids_estimate - 1).bit_length())


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found: files, rows in all, rows looked at, and the columns."""

    files: int
    rows: int
    looked_at: int
    columns: tuple[ColumnFacts, ...]

    def proposal(self, dim: int = 16) -> dict[str, Any]:
        """`schema` and `tables` as a train config has them.

        Raises:
            DataError: no column looks like a label.
        """
        labels = [c.name for c in self.columns if c.role == "label"]
        if not labels:
            raise DataError("no column looks like a label: none holds 0 and 1 only", fix="name it in the schema")
        sparse = [c for c in self.columns if c.role in ("id", "id_list", "weighted_id_list")]
        schema: dict[str, Any] = {"label": {"column": labels[0]}}
        for column in self.columns:
            if column.role == "sample_weight":
                schema["sample_weight"] = {"column": column.name}
            elif column.role == "timestamp":
                schema["timestamp"] = {"column": column.name, **_unit(column)}
        schema["dense"] = [_dense(c) for c in self.columns if c.role == "dense"]
        schema["sparse"] = [_sparse(c) for c in sparse]
        tables = [{"name": c.name, "rows": c.table_rows, "dim": dim, "features": [c.name]} for c in sparse]
        return {"schema": schema, "tables": tables}


def inspect(paths: str | Sequence[str], sample_rows: int = SAMPLE_ROWS, filters: Iterable[Any] = ()) -> Inspection:
    """Reads about `sample_rows` rows, spread over the files, and says what every column looks like.

    Args:
        filters: conditions that rows must meet to be judged, as in a train config.

    Raises:
        DataError: missing paths, unreadable files, a filter that does not fit.
        ValueError: a filter that is none.
    """
    conditions = parse_all(filters)
    everything = Partitioned.of(find_files(paths))
    found = everything.that_pass(conditions)
    tables: list[pa.Table] = []
    rows = looked_at = 0
    for one in found.files:
        with open_parquet(one.file.uri, one.file.size_bytes) as parquet:
            rows += parquet.metadata.num_rows
            wanted = -(-sample_rows // len(found.files))
            for batch in parquet.iter_batches(min(wanted, 65_536)):
                tables.append(_passing(with_partition(batch, one, found.types), conditions, one.file.uri))
                looked_at += batch.num_rows
                wanted -= batch.num_rows
                if wanted <= 0:
                    break
    if not any(len(table) for table in tables):
        raise nothing_left(everything.files[0].file.uri, conditions)
    try:
        table = pa.concat_tables(tables).combine_chunks()
    except pa.ArrowInvalid as error:
        raise DataError(f"the files' columns differ: {error}", fix="inspect one file at a time") from error
    share = looked_at / rows
    columns = [_facts(name, table.column(name), share) for name in table.column_names]
    for role in ("timestamp", "sample_weight"):
        columns = _only_one(columns, role)
    return Inspection(len(found.files), rows, table.num_rows, tuple(_one_label(columns)))


def _passing(table: pa.Table, conditions: Sequence[Condition], uri: str) -> pa.Table:
    for condition in conditions:
        condition.check_in(table.schema, uri)
    return table.filter(pa.array(rows_that_pass(table, conditions)))


def _facts(name: str, column: pa.ChunkedArray, share: float) -> ColumnFacts:
    kind = column.type
    array = pa.concat_arrays([c.cast(without_views(kind)) for c in column.chunks])
    leaf, longest = array, None
    if is_list(kind):
        lists = unnest(array)
        leaf = lists.leaf
        longest = int(pc.max(pa.array(lists.offsets[1:] - lists.offsets[:-1])).as_py() or 0)
    role, note = _role(name, kind, leaf)
    if pat.is_struct(leaf.type) and role == "weighted_id_list":
        leaf = pc.struct_field(leaf, "id")
    if pat.is_dictionary(leaf.type):
        leaf = leaf.dictionary_decode()
    low = high = None
    if pat.is_integer(leaf.type) or pat.is_floating(leaf.type):
        ends = pc.min_max(leaf).as_py()
        low, high = ends["min"], ends["max"]
    if role in ("id", "dense") and not array.null_count and low is not None and high is not None:
        if name.lower() in TIME_NAMES and time_unit(low, high) and pat.is_integer(leaf.type):
            role, note = "timestamp", ""
        elif name.lower() in WEIGHT_NAMES and low >= 0 and role == "dense":
            role, note = "sample_weight", "or a feature? then list it under dense"
    if role == "timestamp" and array.null_count:
        role, note = "unused", "a time that is null in some rows"
    ids = role in ("id", "id_list", "weighted_id_list")
    distinct, estimate = _distinct(leaf, share) if ids else (0, 0)
    return ColumnFacts(name, str(kind), role, array.null_count, len(leaf), distinct, estimate, low, high, longest, note)


def _role(name: str, kind: pa.DataType, leaf: pa.Array) -> tuple[str, str]:
    """(role, note) of a column, judged by its type first, then by its name and values."""
    plain = leaf.type.value_type if pat.is_dictionary(leaf.type) else leaf.type
    if is_list(plain):
        return "unused", "lists of lists: flatten them to one level"
    if is_list(kind):
        if pat.is_struct(plain) and {f.name for f in plain.fields} == {"id", "weight"}:
            return "weighted_id_list", ""
        if pat.is_integer(plain) or is_text(plain):
            return "id_list", ""
        return "unused", f"a list of {plain}"
    if is_text(plain):
        return "id", ""
    if pat.is_boolean(plain):
        return "label", ""
    if pat.is_integer(plain):
        values = pc.unique(leaf if not pat.is_dictionary(leaf.type) else leaf.dictionary_decode()).drop_null()
        if len(values) and pc.all(pc.is_in(values, pa.array([0, 1]).cast(values.type))).as_py():
            return "label", ""
        is_id = name.lower().endswith(("id", "_cat", "_code")) or len(values) < _FEW
        return ("id", "") if is_id else ("dense", "a number? if these are ids, list it under sparse")
    if pat.is_floating(plain) or pat.is_decimal(plain):
        return "dense", ""
    if pat.is_timestamp(plain) or pat.is_date(plain):
        return "timestamp", ""
    return "unused", f"{plain} is neither a number nor an id"


def time_unit(low: float, high: float) -> str | None:
    """The unit in which integers are times between 1973 and 2200; None where in no unit they are."""
    return next((unit for unit, each in UNITS.items() if low >= 10**8 * each and high < LATEST_S * each), None)


def _unit(facts: ColumnFacts) -> dict[str, str]:
    """Of a time in integers; others have their own."""
    unit = None if facts.low is None or facts.high is None else time_unit(facts.low, facts.high)
    return {} if unit in (None, "s") else {"unit": str(unit)}


def _only_one(columns: list[ColumnFacts], role: str) -> list[ColumnFacts]:
    """The first column keeps a role that there is only once."""
    first = next((c.name for c in columns if c.role == role), None)
    note = f"a schema has one {role}, which is {first!r} here"
    return [c if c.role != role or c.name == first else replace(c, role="unused", note=note) for c in columns]


def _one_label(columns: list[ColumnFacts]) -> list[ColumnFacts]:
    """Of the columns that hold 0 and 1 only, the best named is the label; the others are categories."""
    names = [c.name for c in columns if c.role == "label"]
    chosen = next((n for wanted in LABEL_NAMES for n in names if n.lower() == wanted), names[-1] if names else None)
    return [c if c.role != "label" or c.name == chosen else _category(c) for c in columns]


def _category(facts: ColumnFacts) -> ColumnFacts:
    if facts.kind == "bool":
        return ColumnFacts(facts.name, facts.kind, "dense", facts.nulls, facts.values, 0, 0, 0.0, 1.0, None)
    rest = (facts.name, facts.kind, "id", facts.nulls, facts.values)
    return ColumnFacts(*rest, 2, 2, facts.low, facts.high, facts.longest)


def _distinct(leaf: pa.Array, share: float) -> tuple[int, int]:
    """Different ids here, and how many to expect in all (Chao 1984, from those seen once and twice)."""
    counts = leaf.drop_null().value_counts().field("counts") if len(leaf) else pa.array([], pa.int64())
    seen = len(counts)
    if share >= 1 or not seen:
        return seen, max(seen, 1)
    once, twice = (pc.sum(pc.equal(counts, n)).as_py() or 0 for n in (1, 2))
    unseen = once * once / (2 * twice) if twice else once * (once - 1) / 2
    return seen, int(seen + min(unseen, seen * (1 / share - 1)))


def _dense(facts: ColumnFacts) -> dict[str, Any]:
    feature: dict[str, Any] = {"name": facts.name}
    if facts.nulls:
        feature["default"] = 0.0
    if facts.low is not None and facts.low >= 0 and facts.high is not None and facts.high > 100:
        feature["transforms"] = [{"kind": "log1p"}]
    return feature


def _sparse(facts: ColumnFacts) -> dict[str, Any]:
    feature: dict[str, Any] = {"name": facts.name, "kind": facts.role}
    feature["mapping"] = {"kind": "identity" if facts.dense_range else "hash"}
    if facts.nulls:
        feature["on_null"] = "empty"
    return feature
