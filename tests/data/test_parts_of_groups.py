"""Parts of row groups: which decoding goes on, which begins anew, and which pieces one task reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import FileChanged
from rayrec.data.source import slices
from rayrec.data.source.file_table import DataFile
from rayrec.data.source.slices import FileSlice, Origin, RowGroupStreams, read_slices, within
from rayrec.data.stream.reading import WindowShare
from rayrec.storage.parquet import Version
from rayrec.storage.retries import Patience

GROUPS, ROWS = 4, 100
COLUMNS = (("n", pa.int64()),)


@pytest.fixture
def file(tmp_path: Path) -> DataFile:
    """Rows that count through, in row groups of 100."""
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"n": range(GROUPS * ROWS)}), path, row_group_size=ROWS)
    return DataFile(str(path), Version(path.stat().st_size))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The row groups whose decoding began."""
    groups: list[int] = []

    def spy(part: FileSlice, *arguments: Any) -> slices._Stream:
        groups.append(part.row_group)
        return begin(part, *arguments)

    begin = slices._begin
    monkeypatch.setattr(slices, "_begin", spy)
    return groups


def part(file: DataFile, group: int, start: int, stop: int) -> FileSlice:
    return FileSlice(file, group, ROWS, start, stop, group * ROWS)


def read(streams: RowGroupStreams, one: FileSlice) -> list[int]:
    numbers: list[int] = streams.read(one, ["n"])["n"].to_pylist()
    assert numbers == list(range(one.first_row + one.start, one.first_row + one.stop))
    return numbers


def test_the_groups_that_were_read_last_are_kept_open(file: DataFile, begun: list[int]) -> None:
    streams = RowGroupStreams(min_open=2)
    for group in (0, 1, 2):
        read(streams, part(file, group, 0, 40))
    assert begun == [0, 1, 2]
    for group in (1, 2):
        read(streams, part(file, group, 40, 90))
    assert begun == [0, 1, 2], "the two that were read last go on"
    read(streams, part(file, 0, 40, 90))
    assert begun == [0, 1, 2, 0], "the first was closed"
    read(streams, part(file, 2, 90, 100))
    read(streams, part(file, 1, 90, 100))
    assert begun == [0, 1, 2, 0, 1], "then the one that had waited longest"
    streams.close()


def test_as_many_groups_are_kept_open_as_are_read_in_turn(
    file: DataFile, begun: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for count, times in ((3, 1), (1, 4)):
        streams = RowGroupStreams(count, min_open=2)
        for start in range(0, 40, 10):
            for group in (0, 1, 2):
                read(streams, part(file, group, start, start + 10))
        assert len(begun) == 3 * times
        streams.close()
        begun.clear()
    monkeypatch.setattr(slices.resource, "getrlimit", lambda _: (6, 6))
    assert RowGroupStreams(100, min_open=2)._limit == 3, "the process may open few files"


@pytest.mark.parametrize("chunk", [1, 7, 64, 1000])
def test_decoding_goes_on_where_it_can(file: DataFile, begun: list[int], chunk: int) -> None:
    streams = RowGroupStreams(chunk_rows=chunk)
    for start, stop, times in ((0, 10, 1), (10, 11, 1), (50, 60, 1), (59, 70, 2), (70, 100, 2), (99, 100, 3)):
        read(streams, part(file, 3, start, stop))
        assert begun == [3] * times, (start, stop)
    read(streams, part(file, 2, 0, 5))
    streams.close()
    read(streams, part(file, 2, 5, 10))
    assert begun == [3] * 3 + [2] * 2, "closed: all is forgotten"
    streams.close()


@pytest.mark.parametrize(("group", "rows"), [(GROUPS, ROWS), (0, ROWS - 1), (0, ROWS + 1)])
@pytest.mark.parametrize("whole", [True, False])
def test_row_groups_that_are_others_now_are_no_bad_rows(file: DataFile, group: int, rows: int, whole: bool) -> None:
    one = FileSlice(file, group, rows, 0, rows if whole else 10, 0)
    with pytest.raises(FileChanged, match="row groups changed during the run") as caught:
        read_slices([one], COLUMNS, Patience(0, 0))
    assert (caught.value.file, caught.value.row_group) == (file.uri, group)


def test_rows_of_slices_are_found_in_their_file(file: DataFile) -> None:
    parts = (part(file, 1, 90, 100), part(file, 3, 5, 8))
    places = [Origin(parts, None).locate(row)[1:] for row in (0, 9, 10, 12)]
    assert places == [(1, 190), (1, 199), (3, 305), (3, 307)]
    assert read_slices(parts, COLUMNS, Patience())[0]["n"].to_pylist() == [*range(190, 200), 305, 306, 307]
    with pytest.raises(IndexError):
        Origin(parts, None).locate(13)
    assert [(one.row_group, one.start, one.stop) for one in within(parts, 9, 11)] == [(1, 99, 100), (3, 5, 6)]
    assert [(one.row_group, one.start, one.stop) for one in within(parts, 10, 13)] == [(3, 5, 8)]
    assert [(one.row_group, one.start, one.stop) for one in within(parts, 0, 10)] == [(1, 90, 100)]


@pytest.mark.parametrize(
    ("groups", "tasks"),
    [
        ([0, 0, 5, 5, 5, 0, 0, 6, 6], [[0], [1, 2, 3, 4], [5, 6], [7, 8]]),
        ([1, 1, 1, 1, 1, 1, 2], [[0, 1, 2, 3, 4, 5], [6]]),
        ([0, 0, 0], [[0], [1], [2]]),
        ([1, 2, 3, 3], [[0], [1], [2, 3]]),
        ([], []),
    ],
)
def test_pieces_of_one_group_stay_in_one_task(groups: list[int], tasks: list[list[int]]) -> None:
    from rayrec.data.stream.ray_reader import tasks_of

    pieces = [WindowShare((), window, ((0, 1),), group) for window, group in enumerate(groups)]
    assert [[piece.window for piece in task] for task in tasks_of(pieces, 1)] == tasks
