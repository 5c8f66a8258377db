"""Maps a data set and reports bad rows, nulls, hash collisions, list lengths, and how evenly ids use the table rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.arrays.arrow_types import is_list
from rayrec.data.arrays.lists import ids_of, unnest
from rayrec.data.config import BadRows
from rayrec.data.mapping.derived.derive import derive
from rayrec.data.mapping.map_rows import check_rows_of, map_rows, source_columns
from rayrec.data.mapping.problems import Problems
from rayrec.data.mapping.rows import Ids, Rows
from rayrec.data.mapping.schema import Schema
from rayrec.data.order.mix import Mix
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.slices import RowGroupStreams
from rayrec.data.stream.reading import read_window
from rayrec.storage.errors import DataError

MAX_IDS = 20_000_000
LONGEST_SHOWN = 100
SKEW_RANKS = (8, 64)
# Ids to collect, at least, before they are merged with the distinct ones.
_PENDING_IDS = 1 << 18


class DistinctIds:
    """The distinct ids of a column, up to `MAX_IDS`.

    New ids wait until they are as many as the distinct ones, so that the merges cost time linear in the ids.
    """

    def __init__(self) -> None:
        self._distinct: pa.Array | None = pa.nulls(0)
        self._pending, self._num_pending = list[pa.Array](), 0

    def add(self, ids: pa.Array) -> None:
        if self._distinct is None:
            return
        self._pending.append(pc.unique(ids))
        self._num_pending += len(self._pending[-1])
        if self._num_pending >= max(_PENDING_IDS, len(self._distinct)):
            self._merge()

    def count(self) -> int | None:
        """Number of distinct ids; None if there are more than `MAX_IDS`."""
        self._merge()
        return None if self._distinct is None else len(self._distinct)

    def _merge(self) -> None:
        if self._distinct is None or not self._pending:
            return
        kind = self._pending[-1].type
        self._distinct = pc.unique(pa.concat_arrays([ids.cast(kind) for ids in (self._distinct, *self._pending)]))
        self._pending, self._num_pending = [], 0
        self._distinct = self._distinct if len(self._distinct) <= MAX_IDS else None


@dataclass(slots=True)
class FeatureReport:
    """Statistics of a sparse feature, accumulated over windows.

    Args:
        table_rows: rows of its table.
        column: column of its ids.
        counts: [table_rows], number of ids that map to each row.
        ids: number of ids in all bags.
        nulls: number of null ids and lists.
        distinct: distinct raw ids.
        lengths: [LONGEST_SHOWN + 1], histogram of bag lengths; the last entry counts all longer bags.
    """

    name: str
    table_rows: int
    column: str
    counts: npt.NDArray[np.int64]
    ids: int = 0
    nulls: int = 0
    distinct: DistinctIds = field(default_factory=DistinctIds)
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(LONGEST_SHOWN + 1, np.int64))

    @property
    def used_rows(self) -> int:
        return int(np.count_nonzero(self.counts))

    @property
    def hottest(self) -> float | None:
        """The fraction of ids that map to the most used row; None without ids."""
        return float(self.counts.max()) / self.ids if self.ids else None

    def skew(self, ranks: int) -> float | None:
        """Highest over mean number of lookups, if the table is cut into equal blocks of rows; None without ids."""
        if not self.ids:
            return None
        block = -(-self.table_rows // ranks)
        return float(np.add.reduceat(self.counts, range(0, self.table_rows, block)).max()) * ranks / self.ids

    @property
    def distinct_ids(self) -> int | None:
        return self.distinct.count()

    @property
    def collisions(self) -> int | None:
        """Distinct ids minus used rows: ids that share a row with an earlier one."""
        distinct_ids = self.distinct_ids
        return None if distinct_ids is None else max(0, distinct_ids - self.used_rows)

    def add(self, column: pa.Array, ids: Ids, good: npt.NDArray[np.bool_]) -> None:
        """Adds a window: its raw column, its mapped ids, and the mask of good rows."""
        lengths = np.ones(len(good), np.int64) if ids.offsets is None else np.diff(ids.offsets)
        first_value, last_value = ids.span(0, len(good))
        used = ids.values[first_value:last_value][np.repeat(good, lengths)]
        rows, times = np.unique(used, return_counts=True)
        self.counts[rows] += times
        self.ids += int(lengths[good].sum())
        self.lengths += np.bincount(np.minimum(lengths[good], LONGEST_SHOWN), minlength=LONGEST_SHOWN + 1)
        self.nulls += column.null_count + (unnest(column).leaf.null_count if is_list(column.type) else 0)
        self.distinct.add(ids_of(column))

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        names = ("name", "table_rows", "ids", "nulls", "used_rows", "distinct_ids", "collisions", "hottest")
        values = {name: getattr(self, name) for name in names} | {"lengths": self.lengths.tolist()}
        return values | {"skew": {str(ranks): self.skew(ranks) for ranks in SKEW_RANKS}}


@dataclass(slots=True)
class NumberReport:
    """Statistics of a dense feature over the good rows: nulls in the column; range and mean after the transforms."""

    name: str
    nulls: int = 0
    lowest: float = float("inf")
    highest: float = float("-inf")
    mean: float = 0.0
    values: int = 0

    def add(self, values: npt.NDArray[np.float32], column: pa.Array) -> None:
        """Adds a window: the feature's values in good rows, and its raw column."""
        self.nulls += column.null_count
        if values.size:
            self.values += values.size
            self.lowest, self.highest = min(self.lowest, float(values.min())), max(self.highest, float(values.max()))
            self.mean += (float(values.mean(dtype=np.float64)) - self.mean) * values.size / self.values


@dataclass(slots=True)
class CheckReport:
    """The result of `check`. `positives` counts the first label."""

    features: list[FeatureReport]
    numbers: list[NumberReport]
    rows: int = 0
    bad_rows: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    samples: list[DataError] = field(default_factory=list)
    positives: int = 0

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        values = {"rows": self.rows, "bad_rows": self.bad_rows, "reasons": dict(self.reasons)}
        values |= {"samples": [s.to_dict() for s in self.samples], "positives": self.positives}
        return values | {"features": [f.to_dict() for f in self.features], "numbers": [*map(asdict, self.numbers)]}


def check(
    data: Manifest | Mix,
    schema: Schema,
    rows_of: Mapping[str, int],
    bad_rows: BadRows | None = None,
    sample_rows: int | None = None,
) -> CheckReport:
    """Maps every row that passes the filters, and collects statistics. Bad rows do not end it.

    Args:
        bad_rows: how many bad rows to describe, and whether with their values.
        sample_rows: approximate number of rows to read, in windows spread evenly over the data; None: all.

    Raises:
        DataError: a feature without a table.
    """
    schema = schema.hashed
    check_rows_of(schema, rows_of)
    bad_rows = bad_rows or BadRows()
    tables = [(f, rows_of[f.name]) for f in schema.sparse]
    report = CheckReport(
        [FeatureReport(f.name, size, f.column, np.zeros(size, np.int64)) for f, size in tables],
        [NumberReport(f.name) for f in schema.dense],
    )
    for manifest in data.parts:
        share = 1.0 if sample_rows is None else min(1.0, sample_rows / max(1, data.rows))
        num_windows = max(1, round(share * len(manifest.windows)))
        with closing(RowGroupStreams()) as streams:
            for window in (index * len(manifest.windows) // num_windows for index in range(num_windows)):
                table, problems = read_window(manifest, window, streams, redact=bad_rows.redact)
                rows = map_rows(table, schema, rows_of, problems)
                report.reasons.update(problems.reasons())
                bad = problems.rows()
                described = bad[: max(0, bad_rows.samples - len(report.samples))]
                report.samples += [problems.error(row) for row in described.tolist()]
                _add(report, table, rows, bad, schema)
    return report


def _add(report: CheckReport, table: pa.Table, rows: Rows, bad: npt.NDArray[np.int64], schema: Schema) -> None:
    """Adds a window to the report."""
    good = np.ones(table.num_rows, dtype=np.bool_)
    good[bad] = False
    report.rows, report.bad_rows = report.rows + table.num_rows, report.bad_rows + len(bad)
    report.positives += int((rows.targets.label.reshape(len(rows), len(schema.tasks))[good, 0] == 1).sum())
    columns = source_columns(table, schema, schema.feature_columns)
    columns = derive(schema.derived_needed, columns, Problems())
    column = 0
    for number, dense in zip(report.numbers, schema.dense, strict=True):
        number.add(rows.dense[good, column : column + dense.width], columns[dense.column])
        column += dense.width
    for feature, ids in zip(report.features, rows.ids, strict=False):  # then come the lists of sequences
        feature.add(columns[feature.column], ids, good)
