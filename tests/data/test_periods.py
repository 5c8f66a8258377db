"""Days, or other values of a column that folders give: which an epoch trains on and which it is evaluated on."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from rayrec.data import DataError, DataSet, Manifest, Schema
from rayrec.data.source.periods import Periods, count_periods
from tests.data.sets import SCHEMA, write


@pytest.fixture
def days(tmp_path: Path) -> Path:
    for day, sizes in ((10, [40]), (9, [20, 10]), (11, [50])):
        write(tmp_path / "days" / f"day={day}", sizes)
    return tmp_path / "days"


def test_an_epoch_trains_on_a_day_and_is_evaluated_on_the_next(days: Path) -> None:
    periods = Periods.of(Manifest.read(str(days), SCHEMA, by="day"), "day")
    assert (periods.column, periods.values, periods.rows) == ("day", (9, 10, 11), (30, 40, 50))
    assert [periods.train(epoch) for epoch in range(3)] == [("day", 9), ("day", 10), ("day", 11)]
    assert [periods.eval(epoch) for epoch in range(2)] == [("day", 10), ("day", 11)]
    with pytest.raises(IndexError):
        periods.eval(2)


def test_a_day_is_a_part_of_the_data_set(days: Path) -> None:
    manifest = Manifest.read(str(days), SCHEMA, by="day", window_rows=15)
    part = manifest.only(("day", 9))
    assert part.rows == 30 and part.limits == manifest.limits and [w.rows for w in part.windows] == [20, 10]
    assert {Path(uri).parent.name for uri in part.files.uris} == {"day=9"}
    assert manifest.only(("day", 12)).rows == 0 and manifest.only(("hour", 9)).rows == 0
    without = Manifest.read(str(days), SCHEMA, window_rows=15)
    assert without.only(("day", 9)).rows == 0, "nobody asked for the column"
    assert Manifest.of(DataSet(path=str(days)), SCHEMA, by="day").only(("day", 11)).rows == 50


def test_days_are_counted_by_their_names(days: Path) -> None:
    assert count_periods(DataSet(path=str(days)), "day") == 3
    assert count_periods(DataSet(path=str(days), filters=[["day", ">", 9]]), "day") == 2
    for data in (DataSet(path=str(days), filters=[["day", "=", 9]]), DataSet(path=str(days / "day=9"))):
        with pytest.raises(DataError, match="there is one folder day=… or none, and the last one is only evaluated on"):
            count_periods(data, "day")
    with pytest.raises(DataError, match=r"data\.progressive: it lies in no folder hour=…") as caught:
        count_periods(DataSet(path=str(days)), "hour")
    assert Path(caught.value.file or "").parent.name == "day=10"


def test_texts_here_and_numbers_there_are_told_with_both_files(tmp_path: Path) -> None:
    schema = Schema.model_validate({"sparse": [{"name": "hour", "mapping": {"kind": "hash"}}, {"name": "row"}]})
    read = {
        name: Manifest.read(str(write(tmp_path / name / f"hour={name}", [10, 10]).parent), schema)
        for name in ("3", "x", "4")
    }
    assert dict(read["3"].columns)["hour"] == pa.int64() and dict(read["x"].columns)["hour"] == pa.string()
    read["3"].check_like(read["4"])
    with pytest.raises(DataError, match=r"the column is int64 here and string in .*hour=x/part-000") as caught:
        read["3"].check_like(read["x"])
    assert caught.value.column == "hour"
    assert caught.value.file == str(tmp_path / "3" / "hour=3" / "part-000.parquet"), "the first of each"


def test_a_column_of_folders_takes_no_bytes_of_a_row(days: Path) -> None:
    features = [{"name": "row"}, {"name": "day"}]
    without, beside = (
        Manifest.read(str(days), Schema.model_validate({"sparse": features[:count]})).files for count in (1, 2)
    )
    assert [file.row_bytes for file in beside] == [file.row_bytes for file in without]
    assert all(file.row_bytes >= 16 for file in beside), "row and label"


def test_days_are_counted_under_a_condition_on_other_folders(tmp_path: Path) -> None:
    for day, hours in ((1, (5, 6)), (2, (5,)), (3, (6,))):
        for hour in hours:
            write(tmp_path / f"day={day}" / f"hour={hour}", [10])
    assert count_periods(DataSet(path=str(tmp_path)), "day") == 3
    assert count_periods(DataSet(path=str(tmp_path), filters=[["hour", "=", 5]]), "day") == 2
