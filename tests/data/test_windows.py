"""Windows against the law that they follow, row group by row group in plain Python."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.data import DataError
from rayrec.data.source import windows
from rayrec.data.source.file_table import COLUMNS, FileTable
from rayrec.data.source.slices import check_size
from rayrec.data.source.windows import Windows
from rayrec.storage.parquet import open_parquet


class Slice(NamedTuple):
    file: int
    row_group: int
    group_rows: int
    start: int
    stop: int
    first_row: int


def slices_in(windows: Windows) -> list[list[Slice]]:
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


@settings(max_examples=60, deadline=None)
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
        found = Windows.of(files_of(groups, row_bytes, left_out), rows, size)
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


@pytest.fixture
def parquet(tmp_path: Path) -> pq.ParquetFile:
    """8,000 rows: numbers that take 8 bytes each however they are packed, and one text of 1,000 bytes for all."""
    path = tmp_path / "x.parquet"
    rows = {"n": np.zeros(8000, np.int64), "text": ["t" * 1000] * 8000, "list": [["t" * 1000]] * 8000}
    pq.write_table(pa.table(rows), path)
    return open_parquet(str(path))


def sized(parquet: pq.ParquetFile, columns: list[str], chunk: int | None, tmp_path: Path, **limits: int) -> int:
    return check_size(parquet, str(tmp_path / "x.parquet"), 0, columns, chunk, **limits)


def test_rows_are_decoded_in_chunks_that_fit(parquet: pq.ParquetFile, tmp_path: Path) -> None:
    assert sized(parquet, ["n"], None, tmp_path) == 8000
    assert [sized(parquet, ["n"], chunk, tmp_path) for chunk in (1, 100, 8000, 9000)] == [1, 100, 8000, 8000]
    small = {"chunk_bytes": 8 * 100}
    assert [sized(parquet, ["n"], chunk, tmp_path, **small) for chunk in (99, 100, 101, 8000)] == [99, 100, 100, 100]
    assert sized(parquet, ["n"], None, tmp_path, **small) == 8000
    assert sized(parquet, ["n"], 10, tmp_path, chunk_bytes=7) == 1, "never less than a row"


def test_what_decodes_to_too_much_is_refused_before_it_is_decoded(parquet: pq.ParquetFile, tmp_path: Path) -> None:
    assert sized(parquet, ["n"], None, tmp_path, max_bytes=8 * 8000) == 8000
    with pytest.raises(DataError, match=r"decoding 8,000 rows needs 0\.0 GB") as caught:
        sized(parquet, ["n"], None, tmp_path, max_bytes=8 * 8000 - 1)
    assert (caught.value.row_group, caught.value.column) == (0, None)
    assert sized(parquet, ["text", "list"], None, tmp_path, max_bytes=8000 * 1000) == 8000
    limit = {"max_bytes": 8000 * 1000 - 1}
    for column in ("text", "list"):
        with pytest.raises(DataError, match=r"decoding 8,000 rows needs 0\.0 GB") as caught:
            sized(parquet, [column], None, tmp_path, **limit)
        assert caught.value.column == column
        assert sized(parquet, [column], 7999, tmp_path, **limit) == 7999, "a text counts for each row of a chunk"
