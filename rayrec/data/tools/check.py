"""Runs the whole mapping over a data set and reports what it finds: bad rows, nulls, collisions, lengths of lists."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.errors import DataError
from rayrec.data.mapping.arrow_types import is_list
from rayrec.data.mapping.derive import derive
from rayrec.data.mapping.lists import unnest
from rayrec.data.mapping.map_rows import check_rows_of, map_rows, one_array
from rayrec.data.mapping.problems import Problems, Unplaced
from rayrec.data.mapping.rows import Ids
from rayrec.data.mapping.schema import DenseFeature, Schema, SparseFeature
from rayrec.data.options import BadRows
from rayrec.data.order.mix import Mix
from rayrec.data.source.manifest import Manifest
from rayrec.data.source.slices import slices_of
from rayrec.data.stream.reading import read_rows

MAX_IDS = 20_000_000
LONGEST_SHOWN = 100


@dataclass(slots=True)
class FeatureReport:
    """What one sparse feature holds after mapping.

    Args:
        table_rows: rows of its table.
        ids: ids in all bags.
        nulls: null ids and lists.
        used_rows: table rows that some id has.
        distinct_ids: different ids before mapping; counted up to `MAX_IDS`, None beyond.
        lengths: [LONGEST_SHOWN + 1], how many bags have each length, the last one for all that are longer.
    """

    name: str
    table_rows: int
    ids: int = 0
    nulls: int = 0
    used_rows: int = 0
    distinct_ids: int | None = 0
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(LONGEST_SHOWN + 1, np.int64))

    @property
    def collisions(self) -> int | None:
        """Ids that share their row with another one, beyond the first."""
        return None if self.distinct_ids is None else max(0, self.distinct_ids - self.used_rows)


@dataclass(slots=True)
class NumberReport:
    """What one dense feature holds after its transforms, over the good rows: nulls before them, ends, mean."""

    name: str
    nulls: int = 0
    lowest: float = float("inf")
    highest: float = float("-inf")
    mean: float = 0.0


class _Number:
    """Measures one dense feature, window by window."""

    def __init__(self, feature: DenseFeature, place: slice) -> None:
        self.feature, self.place, self.report, self._count = feature, place, NumberReport(feature.name), 0

    def add(self, good: npt.NDArray[np.float32], columns: Mapping[str, pa.ChunkedArray | pa.Array]) -> None:
        report, values = self.report, good[:, self.place]
        report.nulls += columns[self.feature.column].null_count
        if values.size:
            self._count += values.size
            report.lowest = min(report.lowest, float(values.min()))
            report.highest = max(report.highest, float(values.max()))
            report.mean += (float(values.mean(dtype=np.float64)) - report.mean) * values.size / self._count


@dataclass(slots=True)
class CheckReport:
    """The result of `check`: rows, the bad ones by reason, samples of them, positives (of the first label, where there
    are several), and every feature.
    """

    rows: int
    bad_rows: int
    reasons: Counter[str]
    samples: list[DataError]
    positives: int
    features: list[FeatureReport]
    numbers: list[NumberReport] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        features = [
            {
                "name": f.name,
                "table_rows": f.table_rows,
                "ids": f.ids,
                "nulls": f.nulls,
                "used_rows": f.used_rows,
                "distinct_ids": f.distinct_ids,
                "collisions": f.collisions,
                "lengths": f.lengths.tolist(),
            }
            for f in self.features
        ]
        return {
            "rows": self.rows,
            "bad_rows": self.bad_rows,
            "reasons": dict(self.reasons),
            "samples": [s.to_dict() for s in self.samples],
            "positives": self.positives,
            "features": features,
            "numbers": [asdict(one) for one in self.numbers],
        }


class _Feature:
    """Counts one feature, window by window."""

    def __init__(self, feature: SparseFeature, table_rows: int) -> None:
        self.feature, self.report = feature, FeatureReport(feature.name, table_rows)
        self._used = np.zeros(table_rows, dtype=np.bool_)
        self._distinct: pa.Array | None = None

    def add(self, column: pa.ChunkedArray | pa.Array, ids: Ids, good: npt.NDArray[np.bool_]) -> None:
        report = self.report
        lengths = np.ones(len(good), np.int64) if ids.offsets is None else np.diff(ids.offsets)
        first, last = ids.span(0, len(good))
        self._used[ids.values[first:last][np.repeat(good, lengths)]] = True
        report.ids += int(lengths[good].sum())
        report.lengths += np.bincount(np.minimum(lengths[good], LONGEST_SHOWN), minlength=LONGEST_SHOWN + 1)
        for chunk in column.chunks if isinstance(column, pa.ChunkedArray) else [column]:
            self._add_raw(chunk)

    def _add_raw(self, array: pa.Array) -> None:
        report = self.report
        report.nulls += array.null_count
        if is_list(array.type):
            array = unnest(array).leaf
            report.nulls += array.null_count
        if pa.types.is_struct(array.type):
            array = pc.struct_field(array, "id")
        if pa.types.is_dictionary(array.type):
            array = array.dictionary_decode()
        if report.distinct_ids is None:
            return
        found = pc.unique(array.drop_null())
        self._distinct = found if self._distinct is None else pc.unique(pa.concat_arrays([self._distinct, found]))
        report.distinct_ids = len(self._distinct)
        if report.distinct_ids > MAX_IDS:
            report.distinct_ids = self._distinct = None

    def finish(self) -> FeatureReport:
        self.report.used_rows = int(self._used.sum())
        return self.report


def check(
    data: Manifest | Mix, schema: Schema, rows_of: Mapping[str, int], bad_rows: BadRows | None = None
) -> CheckReport:
    """Maps every row that passes the filters of its data set and counts; bad rows do not end it.

    Args:
        bad_rows: how many of them are described, and whether with their values.

    Raises:
        DataError: a feature without a table.
    """
    check_rows_of(schema, rows_of)
    bad_rows = bad_rows or BadRows()
    features = [_Feature(f, rows_of[f.name]) for f in schema.sparse]
    ends = np.cumsum([0, *(f.width for f in schema.dense)]).tolist()
    numbers = [_Number(f, slice(*span)) for f, span in zip(schema.dense, pairwise(ends), strict=True)]
    report = CheckReport(0, 0, Counter(), [], 0, [])
    windows = ((part, window) for part in data.parts for window in part.windows)
    for part, window in windows:
        table, problems = read_rows(slices_of(part, window), part.columns, part.filters, redact=bad_rows.redact)
        rows = map_rows(table, schema, rows_of, problems)
        bad = problems.rows()
        report.rows += table.num_rows
        good = np.ones(table.num_rows, dtype=np.bool_)
        good[bad] = False
        report.bad_rows += len(bad)
        report.reasons.update(problems.reasons())
        report.samples += [problems.error(int(row)) for row in bad[: max(0, bad_rows.samples - len(report.samples))]]
        columns = {name: table.column(name) for name in schema.feature_columns}
        if schema.derived:
            columns = derive(
                schema.derived_needed,
                {name: one_array(column) for name, column in columns.items()},
                Problems(Unplaced()),
            )
        for number in numbers:
            number.add(rows.dense[good], columns)
        first_label = rows.targets.label.reshape(len(rows), -1)[:, 0]
        report.positives += int((first_label[good] == 1).sum())
        for feature, ids in zip(features, rows.ids, strict=True):
            feature.add(columns[feature.feature.column], ids, good)
    report.numbers = [number.report for number in numbers]
    report.features = [feature.finish() for feature in features]
    return report
