"""Inspects a data set without a schema: the facts about its columns, and the label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pyarrow.types as pat

from rayrec.data.arrays.widening import concatenated
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.source.filters import only_passing, parse_all
from rayrec.data.source.partitions import Partitioned, nothing_left, tables_of
from rayrec.data.tools.init.column_facts import ColumnFacts, column_facts
from rayrec.data.tools.init.label_choice import LabelChoice, choose_label
from rayrec.data.tools.init.proposal import propose
from rayrec.data.tools.init.sequences import in_sequences
from rayrec.storage.parquet import Version, open_parquet

SAMPLE_ROWS = 500_000
# A column that predicts the label this well is likely derived from it (leakage).
_LEAKAGE = 0.995
_MIN_ROWS = 100


@dataclass(frozen=True, slots=True)
class Inspection:
    """The result of `inspect`: number of files, rows and inspected rows, the columns, and the label."""

    files: int
    rows: int
    inspected_rows: int
    columns: tuple[ColumnFacts, ...]
    label: LabelChoice | None

    def proposal(self, dim: int = 16, vocabularies: Path | None = None) -> dict[str, Any]:
        """The proposed sections `schema` and `tables` of a train config. Raises as `proposal.propose`."""
        return propose(self.columns, None if self.label is None else self.label.schema, dim, vocabularies)


def inspect(
    paths: str | Sequence[str],
    sample_rows: int = SAMPLE_ROWS,
    filters: Iterable[Any] = (),
    label: str | None = None,
) -> Inspection:
    """Reads about `sample_rows` rows, spread over the files, and computes the facts about every column.

    Args:
        filters: conditions that rows must meet, as in a train config.
        label: COLUMN, COLUMN=VALUE or COLUMN>=NUMBER; None: the column that looks like a label.

    Raises:
        DataError: missing paths, unreadable files, a filter or a label that does not fit.
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
        remaining = -(-sample_rows // len(remaining_files.files))
        for table in tables_of(file, remaining_files.types, at_once=remaining):
            tables.append(only_passing(table, conditions, file.file.uri))
            uris.append(file.file.uri)
            inspected_rows += len(table)
            remaining -= len(table)
            if remaining <= 0:
                break
    if not any(len(table) for table in tables):
        raise nothing_left(all_files.files[0].file.uri, conditions)
    table = concatenated(tables, uris).combine_chunks()
    share = inspected_rows / rows
    columns = [column_facts(name, table.column(name), share, spans.get(name)) for name in table.column_names]
    for role in ("timestamp", "sample_weight", "group"):
        columns = _only_one(columns, role)
    columns = in_sequences(columns)
    chosen = choose_label(table, [c.name for c in columns if c.role == "label"], label)
    if chosen is not None:
        columns = _without_leaks(_one_label(columns, chosen), table, chosen)
    return Inspection(len(remaining_files.files), rows, table.num_rows, tuple(columns), chosen)


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


def _one_label(columns: list[ColumnFacts], label: LabelChoice) -> list[ColumnFacts]:
    """Gives the label column its role. Other columns of 0 and 1 become categories."""
    with_label = (replace(c, role="label", note=label.why) if c.name == label.column else c for c in columns)
    return [_category(c) if c.role == "label" and c.name != label.column else c for c in with_label]


def _category(facts: ColumnFacts) -> ColumnFacts:
    if facts.kind == "bool":
        return replace(facts, role="dense", low=0.0, high=1.0, mean=0.5, deviation=0.5)
    return replace(facts, role="id", distinct=2, ids_estimate=2, values_seen=pa.array([0, 1]))


def _without_leaks(columns: list[ColumnFacts], table: pa.Table, label: LabelChoice) -> list[ColumnFacts]:
    """Marks columns that predict the label alone as unused."""
    labels = label.positives
    if table.num_rows < _MIN_ROWS or not 0.02 < labels.mean() < 0.98:
        return columns
    return [_unless_leak(column, table.column(column.name), labels, label.column) for column in columns]


def _unless_leak(facts: ColumnFacts, column: pa.ChunkedArray, labels: npt.NDArray[np.bool_], label: str) -> ColumnFacts:
    if facts.role not in ("dense", "id") or facts.width > 1 or pat.is_nested(column.type):
        return facts
    if facts.role == "id" and facts.distinct > len(labels) // 50:
        return facts
    encoded = pc.dictionary_encode(column.combine_chunks(), null_encoding="encode")
    codes = encoded.indices.to_numpy()
    counts = np.stack([np.bincount(codes[labels == side], minlength=len(encoded.dictionary)) for side in (False, True)])
    if facts.role == "id":
        separation = counts.max(axis=0).sum() / len(labels)
    else:
        numbers = encoded.dictionary.cast(pa.float64(), safe=False).fill_null(-np.inf).to_numpy(zero_copy_only=False)
        separation = _auc(counts[:, np.argsort(numbers)])
    if separation < _LEAKAGE:
        return facts
    note = f"predicts {label!r} almost perfectly ({separation:.3f}): possible leakage; "
    note += "add it by hand if it is known at prediction time"
    return replace(facts, role="unused", note=note)


def _auc(counts: npt.NDArray[np.int64]) -> float:
    """AUC of ordered values, given the counts of label 0 and 1 for each; the better of both directions."""
    zeros, ones = counts
    zeros_below = np.cumsum(zeros) - zeros
    auc = float((ones * (zeros_below + zeros / 2)).sum() / (zeros.sum() * ones.sum()))
    return max(auc, 1 - auc)
