"""Looks at a data set that has no schema yet and proposes one, with table sizes that fit its ids."""

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

from rayrec.data.formats.find_parquet import find_parquet
from rayrec.data.source.filters import only_passing, parse_all
from rayrec.data.source.partitions import Partitioned, nothing_left, tables_of
from rayrec.data.tools.init.column_facts import ColumnFacts, column_facts
from rayrec.data.tools.init.label_choice import LabelChoice, choose_label
from rayrec.data.tools.init.proposal import propose
from rayrec.data.tools.init.sequences import in_sequences
from rayrec.storage.errors import DataError
from rayrec.storage.parquet import Version, open_parquet

SAMPLE_ROWS = 500_000
_TELLING = 0.995  # a column that predicts the label so well was derived from it
_ROWS_TO_TELL = 100


@dataclass(frozen=True, slots=True)
class Inspection:
    """What was found: files, rows, inspected rows, the columns, and what is predicted."""

    files: int
    rows: int
    looked_at: int
    columns: tuple[ColumnFacts, ...]
    label: LabelChoice | None

    def proposal(self, dim: int = 16, vocabularies: Path | None = None) -> dict[str, Any]:
        """`schema` and `tables` as a train config has them; raises as `proposal.propose`."""
        return propose(self.columns, None if self.label is None else self.label.schema, dim, vocabularies)


def inspect(
    paths: str | Sequence[str],
    sample_rows: int = SAMPLE_ROWS,
    filters: Iterable[Any] = (),
    label: str | None = None,
) -> Inspection:
    """Reads about `sample_rows` rows, spread over the files, and says what every column looks like.

    Args:
        filters: conditions that rows must meet to be judged, as in a train config.
        label: what is predicted: COLUMN, COLUMN=VALUE or COLUMN>=NUMBER; None: the column that looks like it.

    Raises:
        DataError: missing paths, unreadable files, a filter or a label that does not fit.
        ValueError: a filter that is none.
    """
    conditions = parse_all(filters)
    everything = Partitioned.of(find_parquet(paths))
    found = everything.that_pass(conditions)
    tables: list[pa.Table] = []
    spans: dict[str, tuple[int, int] | None] = {}
    rows = looked_at = 0
    for one in found.files:
        with open_parquet(one.file.uri, Version(one.file.size_bytes)) as parquet:
            rows += parquet.metadata.num_rows
            _widen(spans, parquet.metadata)
        wanted = -(-sample_rows // len(found.files))
        for table in tables_of(one, found.types, at_once=wanted):
            tables.append(only_passing(table, conditions, one.file.uri))
            looked_at += len(table)
            wanted -= len(table)
            if wanted <= 0:
                break
    if not any(len(table) for table in tables):
        raise nothing_left(everything.files[0].file.uri, conditions)
    try:
        table = pa.concat_tables(tables).combine_chunks()
    except pa.ArrowInvalid as error:
        raise DataError(f"the files' columns differ: {error}", fix="inspect one file at a time") from error
    share = looked_at / rows
    columns = [column_facts(name, table.column(name), share, spans.get(name)) for name in table.column_names]
    for role in ("timestamp", "sample_weight", "group"):
        columns = _only_one(columns, role)
    columns = in_sequences(columns)
    chosen = choose_label(table, [c.name for c in columns if c.role == "label"], label)
    if chosen is not None:
        columns = _that_do_not_tell(_one_label(columns, chosen), table, chosen)
    return Inspection(len(found.files), rows, table.num_rows, tuple(columns), chosen)


def _widen(spans: dict[str, tuple[int, int] | None], footer: pq.FileMetaData) -> None:
    """Smallest and largest value of every plain integer column, if all row groups have statistics."""
    for group in (footer.row_group(number) for number in range(footer.num_row_groups)):
        for chunk in (group.column(number) for number in range(group.num_columns)):
            name, found = chunk.path_in_schema, chunk.statistics
            if found is None or not found.has_min_max or type(found.min) is not int:
                spans[name] = None
                continue
            low, high = spans.get(name, (found.min, found.max)) or (None, None)
            spans[name] = None if low is None or high is None else (min(low, found.min), max(high, found.max))


def _only_one(columns: list[ColumnFacts], role: str) -> list[ColumnFacts]:
    """The first column keeps a role that there is only once."""
    first = next((c.name for c in columns if c.role == role), None)
    note = f"a schema has one {role}, which is {first!r} here"
    return [c if c.role != role or c.name == first else replace(c, role="unused", note=note) for c in columns]


def _one_label(columns: list[ColumnFacts], label: LabelChoice) -> list[ColumnFacts]:
    """With the role of the label where it belongs; other columns of 0 and 1 are categories."""
    chosen = (replace(c, role="label", note=label.why) if c.name == label.column else c for c in columns)
    return [_category(c) if c.role == "label" and c.name != label.column else c for c in chosen]


def _category(facts: ColumnFacts) -> ColumnFacts:
    if facts.kind == "bool":
        return replace(facts, role="dense", low=0.0, high=1.0, mean=0.5, deviation=0.5)
    return replace(facts, role="id", distinct=2, ids_estimate=2, values_seen=pa.array([0, 1]))


def _that_do_not_tell(columns: list[ColumnFacts], table: pa.Table, label: LabelChoice) -> list[ColumnFacts]:
    """Without the columns that predict the label alone."""
    labels = label.positives
    if table.num_rows < _ROWS_TO_TELL or not 0.02 < labels.mean() < 0.98:
        return columns
    return [_unless_it_tells(column, table.column(column.name), labels, label.column) for column in columns]


def _unless_it_tells(
    facts: ColumnFacts, column: pa.ChunkedArray, labels: npt.NDArray[np.bool_], label: str
) -> ColumnFacts:
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
    if separation < _TELLING:
        return facts
    note = f"tells {label!r} by itself ({separation:.3f}): made of it? list it if it is known before the label"
    return replace(facts, role="unused", note=note)


def _auc(counts: npt.NDArray[np.int64]) -> float:
    """Of ordered values, with how many zeros and ones each comes; of the better one of both directions."""
    zeros, ones = counts
    below = np.cumsum(zeros) - zeros
    auc = float((ones * (below + zeros / 2)).sum() / (zeros.sum() * ones.sum()))
    return max(auc, 1 - auc)
