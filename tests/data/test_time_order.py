"""Windows in the order of time: their rows, on any number of ranks, resumed and divided again in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import BatchStream, Cursor, DataError, Manifest, ReadOptions, WindowsConfig, in_time_order
from rayrec.storage.retries import Patience
from tests.data.sets import ROWS_OF, SCHEMA, table

TIMED = type(SCHEMA).model_validate({**SCHEMA.model_dump(), "timestamp": {"column": "at"}})
DAY = 86_400


def write(folder: Path, at: np.ndarray, sizes: list[int], names: list[str] | None = None) -> Path:
    """Files of consecutive rows with these times; the column `row` numbers them in the order of time."""
    folder.mkdir(exist_ok=True)
    first = 0
    for number, rows in enumerate(sizes):
        part = table(rows, first, at=pa.array(at[first : first + rows], pa.timestamp("s")))
        pq.write_table(part, folder / (names[number] if names else f"{number}.parquet"), row_group_size=70)
        first += rows
    return folder


def ordered(folder: Path, **windows: Any) -> Any:
    manifest = Manifest.read(str(folder), TIMED, window_rows=50)
    return in_time_order(manifest, TIMED.timestamp, WindowsConfig(**windows), Patience(0, 0))


def rows_of(manifest: Manifest, cursor: Cursor, plan: list[tuple[int, int | None]], step: int | None) -> list[int]:
    """The rows of a window, step after step; `plan` has (ranks, steps until they stop)."""
    rows: list[int] = []
    for world, stop in plan:
        streams = [
            BatchStream(
                manifest, TIMED, ROWS_OF, batch_rows=(step or 30) / world if step else 30, rank=rank, world_size=world,
                cursor=cursor, seed=3, shuffle=False, in_steps_of=step, options=ReadOptions(reader="local"),
            )
            for rank in range(world)
        ]  # fmt: skip
        cursors, steps = [stream.start_cursor for stream in streams], 0
        while steps != stop and any(items := [next(stream, None) for stream in streams]):
            for rank, item in enumerate(items):
                if item is not None:
                    cursors[rank] = item[1]
                    rows += item[0].sparse["row"].values().tolist()
            steps += 1
        for stream in streams:
            stream.close()
        cursor = Cursor.from_dict(Cursor.merge(cursors).to_dict())
    assert cursor.over
    return rows


@pytest.mark.parametrize("windows", [{"rows": 83}, {"time": "1d"}, {"time": "7h"}])
def test_windows_have_the_rows_in_order_of_time_on_any_number_of_ranks(tmp_path: Path, windows: Any) -> None:
    random = np.random.default_rng(1)
    at = np.sort(random.integers(0, 9 * DAY, 700))
    at[300:] += 3 * DAY  # days without rows
    write(tmp_path / "log", at, [150, 250, 5, 295], ["z.parquet", "b.parquet", "c.parquet", "a.parquet"])
    manifest, periods = ordered(tmp_path / "log", **windows)
    length = {"1d": DAY, "7h": 7 * 3600}.get(windows.get("time", ""), 0)
    bounds = np.arange(700) // 83 if "rows" in windows else at // length
    expected = [np.flatnonzero(bounds == one).tolist() for one in np.unique(bounds)]
    assert [stop - start for start, stop in periods.spans.values()] == [len(rows) for rows in expected]
    for number, value in enumerate(periods.values):
        cursor = Cursor.start(number, (periods.column, value))
        plans = [[(1, None)], [(2, None)], [(3, None)], [(5, None)], [(2, 1), (3, 1), (1, None)], [(3, 2), (5, None)]]
        for plan in plans if number % 3 == 0 else plans[3:5]:
            assert rows_of(manifest, cursor, plan, 16) == expected[number], (number, plan)
        assert sorted(rows_of(manifest, cursor, [(2, 1), (3, None)], None)) == expected[number], "of an evaluation"


def test_later_files_do_not_change_a_window_that_is_trained_on_in_part(tmp_path: Path) -> None:
    at = np.arange(300) * 3600
    folder = write(tmp_path / "log", at, [100, 100, 100])
    (folder / "2.parquet").rename(tmp_path / "later.parquet")
    manifest, periods = ordered(folder, time="1d")
    cursor = Cursor.start(0, (periods.column, periods.values[5]))
    with BatchStream(
        manifest, TIMED, ROWS_OF, batch_rows=10, rank=0, world_size=1, cursor=cursor, seed=3, shuffle=False,
        in_steps_of=10, options=ReadOptions(reader="local"),
    ) as stream:  # fmt: skip
        batch, cursor = next(stream)
    (tmp_path / "later.parquet").rename(folder / "2.parquet")
    (folder / "0.parquet").unlink()  # old files may be removed
    manifest, periods = ordered(folder, time="1d")
    assert periods.continues(cursor.only, over=False)
    assert batch.sparse["row"].values().tolist() == list(range(120, 130))
    assert rows_of(manifest, cursor, [(2, None)], 10) == list(range(130, 144))


def test_windows_of_rows_notice_earlier_rows_that_are_gone(tmp_path: Path) -> None:
    folder = write(tmp_path / "log", np.arange(300), [100, 100, 100])
    _, periods = ordered(folder, rows=50)
    current = (periods.column, periods.values[3])
    assert periods.continues(current, over=True)
    with pytest.raises(DataError, match="windows of 50 rows, which begin at other rows"):
        ordered(folder, rows=25)[1].continues(current, over=True)
    (folder / "0.parquet").unlink()
    with pytest.raises(DataError, match=r"no window begins at row 150 .* earlier rows were added or removed"):
        ordered(folder, rows=50)[1].continues(current, over=True)


@pytest.mark.parametrize(
    ("at", "message"),
    [
        ([1, 2, 3, 2, 5, 6], r"1970-01-01T00:00:02 is earlier than 1970-01-01T00:00:03 of the row before.*row 3"),
        ([1, 2, None, 4, 5, 6], r"the time is null.*row 2"),
        ([1, 2, 9, 4, 5, 6], r"begins at 1970-01-01T00:00:04, but .*0\.parquet lasts until 1970-01-01T00:00:09"),
    ],
)
def test_rows_that_are_not_in_order_are_named(tmp_path: Path, at: list[Any], message: str) -> None:
    rows = [3, 3] if "begins" in message else [6]
    for number, size in enumerate(rows):
        part = table(size, at=pa.array(at[3 * number : 3 * number + size], pa.timestamp("s")))
        pq.write_table(part, tmp_path / f"{number}.parquet")
    with pytest.raises(DataError, match=f"(?s){message}"):
        ordered(tmp_path, rows=2)
