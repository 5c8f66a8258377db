"""Inspects a data set without a schema: the facts about its columns, and the label."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data.arrays.buffers import I64
from rayrec.data.arrays.widening import concatenated
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.source.filters import only_passing, parse_all
from rayrec.data.source.partitions import Partitioned, nothing_left, tables_of
from rayrec.data.tools.init.column_facts import ColumnFacts, column_facts
from rayrec.data.tools.init.label_choice import LabelChoice, choose_labels
from rayrec.data.tools.init.outcomes import without_outcomes
from rayrec.data.tools.init.proposal import propose
from rayrec.data.tools.init.sequences import in_sequences
from rayrec.data.tools.init.shared_tables import with_shared_tables
from rayrec.data.tools.init.stated_roles import StatedRoles, columns_of, first_wrong, refuse_used, roles_by_column
from rayrec.data.tools.init.times import TimeColumn, choose_time, without_periods
from rayrec.storage.errors import DataError
from rayrec.storage.parquet import Version, open_parquet

SAMPLE_ROWS = 500_000
_FLOATS = ("halffloat", "float", "double")


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of `inspect`.

    Args:
        files, rows, inspected_rows: their numbers.
        columns: facts about the columns.
        labels: the labels; empty if no column looks like one.
        time: the column with the time of a row.
        questions: a line for each column that may be the time of a row.
        seconds: [inspected_rows], the time of each row since 1970; None without a time.
    """

    files: int
    rows: int
    inspected_rows: int
    columns: tuple[ColumnFacts, ...]
    labels: tuple[LabelChoice, ...]
    time: TimeColumn | None
    questions: tuple[str, ...]
    seconds: I64 | None = field(default=None, compare=False)

    @property
    def label(self) -> LabelChoice | None:
        """The first label; None if no column looks like one."""
        return self.labels[0] if self.labels else None

    def proposal(self, dim: int = 16, vocabularies: Path | None = None, seconds: I64 | None = None) -> dict[str, Any]:
        """The proposed sections `schema` and `tables` of a train config. Raises as `proposal.propose`.

        Args:
            seconds: times of all training rows, or of an even sample; None: times of the inspected rows.
        """
        seconds = self.seconds if seconds is None else seconds
        return propose(self.columns, [label.schema for label in self.labels], dim, vocabularies, seconds)


def inspect(
    paths: str | Sequence[str],
    sample_rows: int = SAMPLE_ROWS,
    filters: Iterable[Any] = (),
    label: str | Sequence[str] | None = None,
    keep: Collection[str] = (),
    time: str | None = None,
    roles: StatedRoles | None = None,
) -> Inspection:
    """Reads about `sample_rows` rows, spread over the files, and computes the facts about every column.

    Args:
        filters: conditions for the rows to read, as in a train config.
        label: COLUMN, COLUMN=VALUE or COLUMN>=NUMBER, or several of them; None: the column that looks like a label.
        keep: columns that stay features although they seem to be known only after the label.
        time: COLUMN or COLUMN=FORMAT with the time of a row; None: recognized by its values.
        roles: columns by what they are, e.g. `{"ids": ["zone"], "ignore": ["note"]}`; others are guessed.

    Raises:
        DataError: missing paths, unreadable files, a filter, a label, a time or a stated role that does not fit, an
            unknown column to keep.
        ValueError: an invalid filter.
    """
    conditions = parse_all(filters)
    all_files = Partitioned.of(find_parquet(paths))
    remaining_files = all_files.that_pass(conditions)
    tables: list[pa.Table] = []
    uris: list[str] = []
    spans: dict[str, tuple[int, int] | None] = {}
    rows = inspected_rows = 0
    for file in remaining_files.files:
        with open_parquet(file.file.uri, Version(file.file.size_bytes)) as parquet:
            rows += parquet.metadata.num_rows
            _widen(spans, parquet.metadata)
        remaining, first_row = -(-sample_rows // len(remaining_files.files)), 0
        for table in tables_of(file, remaining_files.types, at_once=remaining):
            tables.append(only_passing(table, conditions, file.file, first_row))
            uris.append(file.file.uri)
            first_row += len(table)
            inspected_rows += len(table)
            remaining -= len(table)
            if remaining <= 0:
                break
    if rows < 2 and not conditions:
        problem = f"the files have {'a single row' if rows else 'no rows'}"
        first = all_files.files[0].file.uri
        fix = "name files with rows of both label 0 and label 1; JSON has one object per line, or one array of objects"
        raise DataError(problem, file=first, fix=fix)
    if not any(len(table) for table in tables):
        raise nothing_left(all_files.files[0].file.uri, conditions)
    table = concatenated(tables, uris).combine_chunks()
    share = inspected_rows / rows
    kept = [*columns_of("keep", keep, table.column_names)]
    stated = roles_by_column(roles or {}, table.column_names, kept)
    rows_of = [(uri, len(part)) for uri, part in zip(uris, tables, strict=True)]
    for name, stated_role in stated.items():
        if (wrong := first_wrong(table.column(name).combine_chunks(), stated_role)) is not None:
            raise _located(wrong, f"--{stated_role} {name}", name, [] if conditions else rows_of)
    ignored = [name for name, role in stated.items() if role == "ignore"]
    roles_of = {name: role for name, role in stated.items() if role != "ignore"}
    columns = [
        column_facts(name, table.column(name), share, spans.get(name), roles_of.get(name, ""))
        for name in table.column_names
    ]
    # An ignored label or time keeps its role until it is chosen, so that it is refused and no other one is guessed.
    columns = [_ignored(c) if c.name in ignored and c.role not in ("label", "timestamp") else c for c in columns]
    for role in ("timestamp", "sample_weight", "group"):
        columns = _only_one(columns, role)
    columns = _with_sequences(columns)
    candidates = [c.name for c in columns if c.role == "label"]
    labels = choose_labels(table, candidates, [label] if isinstance(label, str) else label or [])
    columns = _with_labels(columns, labels) if labels else columns
    chosen_time, columns, questions = _choose_time(columns, table, time)
    refuse_used(stated, [choice.column for choice in labels], chosen_time.column if chosen_time else None)
    columns = [_ignored(c) if c.name in ignored else c for c in columns]
    seconds = None if chosen_time is None else chosen_time.seconds(table)
    if labels:
        binary = [c.name for c in columns if c.binary]
        columns = without_outcomes(columns, table, labels, seconds, binary, kept)
    if chosen_time is not None and seconds is not None:
        columns = without_periods(columns, table, chosen_time.column, seconds)
    columns = with_shared_tables(columns, table)
    counts = len(remaining_files.files), rows, table.num_rows
    return Inspection(*counts, tuple(columns), tuple(labels), chosen_time, tuple(questions), seconds)


def _located(wrong: tuple[int, DataError], option: str, column: str, rows_of: Iterable[tuple[str, int]]) -> DataError:
    """The error of a value, with its file and row.

    Args:
        wrong: position in all inspected rows, and the error.
        rows_of: file and number of the inspected rows, in their order; the rows are the first ones of each file. Empty
            if that is not known.
    """
    position, error = wrong
    error = replace(error, problem=f"{option}: {error.problem}", column=column)
    earlier: dict[str, int] = {}
    for uri, rows in rows_of:
        if position < rows:
            return error.at(uri, None, earlier.get(uri, 0) + position)
        position, earlier[uri] = position - rows, earlier.get(uri, 0) + rows
    return error


def _ignored(facts: ColumnFacts) -> ColumnFacts:
    return replace(facts, role="unused", note="", stated="ignore")


def _with_sequences(columns: list[ColumnFacts]) -> list[ColumnFacts]:
    """As `in_sequences`, with the stated roles. Columns that are ignored do not part a sequence."""
    changed = {c.name: c for c in in_sequences([c for c in columns if c.stated != "ignore"])}
    return [
        replace(changed[c.name], role=c.role) if c.stated in ("ids", "lists") else changed.get(c.name, c)
        for c in columns
    ]


def _choose_time(
    columns: list[ColumnFacts], table: pa.Table, option: str | None
) -> tuple[TimeColumn | None, list[ColumnFacts], list[str]]:
    """As `choose_time`; a column that is stated to hold ids or numbers is not guessed to be the time."""
    hidden = {c.name for c in columns if c.stated not in ("", "ignore") and option is None}
    ignored = tuple(f"{c.name}: " for c in columns if c.stated == "ignore")
    chosen, result, questions = choose_time(
        [replace(c, outcome=True) if c.name in hidden else c for c in columns], table, option
    )
    return (
        chosen,
        [replace(c, outcome=False) if c.name in hidden else c for c in result],
        [line for line in questions if not line.startswith(ignored)],
    )


def _widen(spans: dict[str, tuple[int, int] | None], footer: pq.FileMetaData) -> None:
    """Updates minimum and maximum of flat integer columns; None if a row group lacks statistics."""
    for group in (footer.row_group(number) for number in range(footer.num_row_groups)):
        for chunk in (group.column(number) for number in range(group.num_columns)):
            name, statistics = chunk.path_in_schema, chunk.statistics
            if statistics is None or not statistics.has_min_max or type(statistics.min) is not int:
                spans[name] = None
                continue
            low, high = spans.get(name, (statistics.min, statistics.max)) or (None, None)
            spans[name] = None if low is None or high is None else (min(low, statistics.min), max(high, statistics.max))


def _only_one(columns: list[ColumnFacts], role: str) -> list[ColumnFacts]:
    """Keeps a role that a schema has only once for the first column."""
    first_column = next((c.name for c in columns if c.role == role), None)
    note = f"a schema has one {role}: {first_column!r}"
    return [c if c.role != role or c.name == first_column else replace(c, role="unused", note=note) for c in columns]


def _with_labels(columns: list[ColumnFacts], labels: Sequence[LabelChoice]) -> list[ColumnFacts]:
    """Gives the label columns their role. Other columns of 0 and 1 become categories."""
    reasons = {label.column: label.why for label in labels}
    with_labels = (replace(c, role="label", note=reasons[c.name]) if c.name in reasons else c for c in columns)
    return [_category(c) if c.role == "label" and c.name not in reasons else c for c in with_labels]


def _category(facts: ColumnFacts) -> ColumnFacts:
    if facts.kind == "bool" or facts.kind in _FLOATS:
        return replace(facts, role="dense", low=0.0, high=1.0, mean=0.5, deviation=0.5)
    return replace(facts, role="id", distinct=2, ids_estimate=2, values_seen=pa.array([0, 1]))
