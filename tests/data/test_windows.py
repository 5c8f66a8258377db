"""Windows against the law that they follow, row group by row group in plain Python."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data import Condition, Manifest
from rayrec.data.source import windows
from rayrec.data.source.file_table import COLUMNS, FileTable


class Slice(NamedTuple):
    file: int
    row_group: int
    group_rows: int
    start: int
    stop: int
    first_row: int


def slices_in(windows: windows.Windows) -> list[list[Slice]]:
    """Those of each window."""
    found = windows.slices(np.arange(windows.edges[-1]))
    rows = [Slice(*row) for row in zip(*(getattr(found, name).tolist() for name in Slice._fields), strict=True)]
    return [rows[first:last] for first, last in pairwise(windows.edges.tolist())]


def files_of(groups: list[list[int]], row_bytes: list[float], left_out: list[set[int]]) -> FileTable:
    count = len(groups)
    columns = pa.record_batch(
        [
            np.zeros(count, np.int32),
            [f"{n}.parquet" for n in range(count)],
            *(np.zeros(count, np.int64) for _ in range(4)),
            pa.array(row_bytes, pa.float32()),
            *([None] * count for _ in range(2)),
        ],
        schema=COLUMNS,
    )
    return FileTable(
        (("/data/", ()),),
        columns,
        np.cumsum([0, *map(len, groups)]),
        np.array([rows for file in groups for rows in file], np.int64),
        np.array(
            [number in out for file, out in zip(groups, left_out, strict=True) for number in range(len(file))], bool
        ),
    )


def by_hand(
    groups: list[list[int]], row_bytes: list[float], left_out: list[set[int]], rows: int, size: int
) -> list[list[Slice]]:
    """Slice after slice: a window ends before one with which it would be further from its rows, or too large."""
    found: list[list[Slice]] = []
    window: list[Slice] = []
    held, held_bytes = 0, 0.0
    for file, (of_file, each, out) in enumerate(zip(groups, row_bytes, left_out, strict=True)):
        before = 0
        for number, count in enumerate(of_file):
            if count and number not in out:
                parts = min(count, max(1, count // rows, -(-int(count * each) // size)))
                length = -(-count // parts)
                for start in range(0, count, length):
                    stop = min(start + length, count)
                    more = stop - start
                    further = held + more - rows > rows - held
                    if window and (further or held_bytes + more * each > size):
                        found.append(window)
                        window, held, held_bytes = [], 0, 0.0
                    window.append(Slice(file, number, count, start, stop, before))
                    held, held_bytes = held + more, held_bytes + more * each
                    if held >= rows:
                        found.append(window)
                        window, held, held_bytes = [], 0, 0.0
            before += count
    return found + ([window] if window else [])


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 40), max_size=6),
            st.sampled_from([0.0, 1.0, 2.5, 30.0]),
            st.sets(st.integers(0, 5), max_size=2),
        ),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 30),
    st.integers(1, 200),
    st.sampled_from([1, 3, 1 << 16]),
)
def test_windows_are_cut_and_joined_by_their_law(
    files: list[tuple[list[int], float, set[int]]], rows: int, size: int, at_once: int
) -> None:
    groups, row_bytes = [one[0] for one in files], [one[1] for one in files]
    left_out = [{number for number in one[2] if number < len(one[0])} for one in files]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(windows, "_AT_ONCE", at_once)
        found = windows.Windows.of(files_of(groups, row_bytes, left_out), rows, size)
    expected = by_hand(groups, row_bytes, left_out, rows, size)
    assert slices_in(found) == expected and len(found) == len(expected)
    assert found.rows.tolist() == [sum(s.stop - s.start for s in window) for window in expected]
    cut = [
        None if len(w) > 1 or groups[w[0].file][w[0].row_group] == w[0].stop - w[0].start else w[0] for w in expected
    ]
    runs: list[int] = []
    for one, own in pairwise([None, *cut]):
        if one and own and (one.file, one.row_group) == (own.file, own.row_group):
            runs[-1] += 1
        else:
            runs.append(1)
    assert found.runs.tolist() == runs


def test_the_fingerprint_never_changes() -> None:
    """A cursor fits the data set that has the fingerprint in it."""
    numbers = [pa.array([number, number + 1]) for number in (1000, 5, 77, 0)]
    columns = pa.record_batch(
        [[0, 1], ["x", "y"], *numbers, [8.0, 16.0], *([None] * 2 for _ in range(2))], schema=COLUMNS
    )
    folders = (("/a/day=1/", (("day", 1),)), ("/a/day=2/", (("day", 2),)))
    files = FileTable(folders, columns, np.array([0, 2, 3]), np.array([50, 60, 300]), np.array([False, True, False]))
    cut = windows.Windows.of(files, 100, 1 << 20)
    manifest = Manifest(files, cut, (("x", pa.int64()),))
    assert manifest.fingerprint == "3fe35fd1e99888069c3931e7d758c204"
    filtered = replace(manifest, filters=(Condition.parse(["x", "<", 3]),))
    assert filtered.fingerprint == "3510c0f43e599660705d6a3016da8dc8"
    assert manifest.nbytes == files.nbytes + cut.slice_counts.nbytes + cut.edges.nbytes
