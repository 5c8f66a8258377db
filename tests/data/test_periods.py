"""Days, or other values of a column that folders give: which an epoch trains on and which it is evaluated on."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest

from rayrec.data import Cursor, DataError, DataSet, Manifest, Schema
from rayrec.data.config import DataConfig
from rayrec.data.order.periods import Periods
from tests.data.mapped import kept
from tests.data.sets import SCHEMA, write


@pytest.fixture
def days(tmp_path: Path) -> Path:
    for day, sizes in ((10, [40]), (9, [20, 10]), (11, [50])):
        write(tmp_path / "days" / f"day={day}", sizes)
    return tmp_path / "days"


def test_a_run_trains_on_a_day_and_is_evaluated_on_the_next(days: Path) -> None:
    periods = Periods.of(DataSet(path=str(days)), "day")
    assert (periods.column, periods.values) == ("day", (9, 10, 11))
    assert [periods.next(value) for value in (None, 9)] == [("day", 9), ("day", 10)]
    assert [periods.evaluated_after(("day", value)) for value in (9, 10)] == [("day", 10), ("day", 11)]
    assert [periods.remaining(value) for value in (None, 8, 9, 10, 11, 12)] == [(9, 10), (9, 10), (10,), (), (), ()]
    with pytest.raises(
        DataError, match="nothing to train on after day=10; the newest folder day=… is used for evaluation only"
    ):
        periods.next(10)
    with pytest.raises(DataError, match="no folder after day=11 to evaluate on"):
        periods.evaluated_after(("day", 11))


def test_the_rows_of_every_day_are_counted_at_once(days: Path) -> None:
    write(days / "day=9" / "more", [5])
    manifest = Manifest.read(str(days), SCHEMA, by="day")
    assert manifest.rows_by("day") == {9: 35, 10: 40, 11: 50} and manifest.rows_by("hour") == {}
    assert {day: manifest.only(("day", day)).rows for day in (9, 10, 11)} == manifest.rows_by("day")
    some = Manifest.read(str(days), SCHEMA, by="day", filters=[["row", ">=", 20]])
    assert some.rows_by("day") == {day: some.only(("day", day)).rows for day in (9, 10, 11)}, "whole groups left out"


def test_a_day_is_a_part_of_the_data_set(days: Path) -> None:
    manifest = Manifest.read(str(days), SCHEMA, by="day", window_rows=15)
    part = manifest.only(("day", 9))
    assert part.rows == 30 and part.limits == manifest.limits and part.windows.rows.tolist() == [20, 10]
    assert {Path(uri).parent.name for uri in part.files.uris} == {"day=9"}
    assert manifest.only(("day", 12)).rows == 0 and manifest.only(("hour", 9)).rows == 0
    without = Manifest.read(str(days), SCHEMA, window_rows=15)
    assert without.only(("day", 9)).rows == 0, "nobody asked for the column"
    assert Manifest.of(DataSet(path=str(days)), SCHEMA, by="day").only(("day", 11)).rows == 50


def test_days_are_found_by_their_names(days: Path) -> None:
    assert Periods.of(DataSet(path=str(days), filters=[["day", ">", 9]]), "day").values == (10, 11)
    for data in (DataSet(path=str(days), filters=[["day", "=", 9]]), DataSet(path=str(days / "day=9"))):
        with pytest.raises(DataError, match="nothing to train on; the newest folder day=… is used for evaluation only"):
            Periods.of(data, "day").next(None)
    with pytest.raises(DataError, match=r"data\.progressive: the file is not in a folder hour=…") as caught:
        Periods.of(DataSet(path=str(days)), "hour")
    assert Path(caught.value.file or "").parent.name == "day=10"


def test_a_run_inside_a_day_goes_on_while_that_is_there(days: Path) -> None:
    periods = Periods.of(DataSet(path=str(days)), "day")
    assert periods.continues(("day", 10), over=False) and periods.continues(("day", 3), over=True)
    with pytest.raises(DataError, match="day=8 was trained on in part, but its folder is missing") as caught:
        periods.continues(("day", 8), over=False)
    assert "[[day, '>', 8]]" in str(caught.value), "the way out"
    moved = Periods.of(DataSet(path=str(days), filters=[["day", ">", 9], ["row", ">", 0]]), "day")
    assert not moved.continues(("day", 9), over=False), "filters leave out the rest of it"
    with pytest.raises(DataError, match="no folder after day=11 to evaluate on"):
        periods.continues(("day", 11), over=False)
    with pytest.raises(DataError, match="is 'day', but the checkpoint was trained with 'hour'"):
        periods.continues(("hour", 9), over=True)
    with pytest.raises(DataError, match="day=2024-01-01 was a string in training, but day=9 is an integer"):
        periods.continues(("day", "2024-01-01"), over=True)


def test_what_comes_and_what_is_left_out_is_reported_by_name() -> None:
    periods = Periods("day", tuple(range(1, 21)))
    assert periods.report(("day", 9), (8,)) == (
        "at day=9; next: day=10, day=11, day=12, day=13, day=14 and 5 more to 19; NOT trained on: day=1, day=2, day=3, "
        "day=4, day=5 and 2 more to 7, which arrived late or were excluded by `filters`; training does not return to "
        "periods before 9"
    )
    assert Periods("day", (8, 9, 10)).report(("day", 9), (8,)) == "at day=9; next: nothing until a new folder exists"


def test_numbers_of_folders_are_texts_where_training_had_texts(tmp_path: Path) -> None:
    schema = Schema.model_validate({"sparse": [{"name": "hour", "mapping": {"kind": "hash"}}, {"name": "row"}]})
    read = {
        name: Manifest.read(str(write(tmp_path / name / f"hour={name}", [10, 10]).parent), schema)
        for name in ("3", "x")
    }
    assert dict(read["3"].columns)["hour"] == pa.int64() and dict(read["x"].columns)["hour"] == pa.string()
    trained = kept(schema, dict(read["x"].columns))
    assert [feature.id_type for feature in trained.sparse] == ["text", "integer"] and trained.text_columns == ["hour"]
    assert dict(Manifest.read(str(tmp_path / "3"), trained).files[0].partition) == {"hour": "3"}
    assert Periods.of(DataSet(path=str(tmp_path / "3")), "hour", trained.text_columns).values == ("3",)


def test_a_column_of_folders_takes_no_bytes_of_a_row(days: Path) -> None:
    features = [{"name": "row"}, {"name": "day"}]
    without, beside = (
        Manifest.read(str(days), Schema.model_validate({"sparse": features[:count]})).files for count in (1, 2)
    )
    row_bytes = [files.columns["row_bytes"].to_pylist() for files in (beside, without)]
    assert row_bytes[0] == row_bytes[1] and min(row_bytes[0]) >= 16, "row and label"


def test_days_are_found_under_a_condition_on_other_folders(tmp_path: Path) -> None:
    for day, hours in ((1, (5, 6)), (2, (5,)), (3, (6,))):
        for hour in hours:
            write(tmp_path / f"day={day}" / f"hour={hour}", [10])
    assert Periods.of(DataSet(path=str(tmp_path)), "day").values == (1, 2, 3)
    assert Periods.of(DataSet(path=str(tmp_path), filters=[["hour", "=", 5]]), "day").values == (1, 2)


@pytest.fixture
def dates(tmp_path: Path) -> Path:
    for month, days in ((2, (1, 2)), (10, (1,)), (9, (1, 30))):
        for day in days:
            write(tmp_path / "dates" / "year=2024" / f"month={month:02}" / f"day={day:02}", [day])
    return tmp_path / "dates"


def test_a_day_of_several_months_is_not_one_period(dates: Path) -> None:
    message = (
        r"day=1 is in year=2024/month=02 and in year=2024/month=09.* progressive: \[year, month, day\], or, if it is "
        r"one period in all of these folders, progressive: \[day\]"
    )
    with pytest.raises(DataError, match=message):
        Periods.of(DataSet(path=str(dates)), "day")
    assert Periods.of(DataSet(path=str(dates)), ["day"]) == Periods("day", (1, 2, 30), (), str(dates))
    assert Periods.of(DataSet(path=str(dates), filters=[["month", "=", 2]]), "day").values == (1, 2)
    assert Periods.of(DataSet(path=str(dates)), "month").values == (2, 9, 10)


def test_several_columns_are_a_period_in_the_order_of_time(dates: Path) -> None:
    names = ["year", "month", "day"]
    periods = Periods.of(DataSet(path=str(dates)), names)
    key = ("year", "month", "day")
    assert periods.values == ((2024, 2, 1), (2024, 2, 2), (2024, 9, 1), (2024, 9, 30), (2024, 10, 1))
    assert periods.next((2024, 2, 2)) == (key, (2024, 9, 1))
    assert periods.report((key, (2024, 9, 1)), ()) == (
        "at year=2024/month=9/day=1; next: year=2024/month=9/day=30; NOT trained on: year=2024/month=2/day=1, "
        "year=2024/month=2/day=2, which arrived late or were excluded by `filters`; training does not return to "
        "periods before year=2024/month=9/day=1"
    )
    manifest = Manifest.read(str(dates), SCHEMA, by=names)
    rows = {value: value[2] for value in periods.values if isinstance(value, tuple)}
    assert manifest.rows_by(key) == rows == {value: manifest.only((key, value)).rows for value in periods.values}
    cursor = Cursor.start(3, periods.next(None))
    assert Cursor.from_dict(json.loads(json.dumps(cursor.to_dict()))) == cursor
    assert periods.continues((key, (2024, 9, 1)), over=False)
    with pytest.raises(DataError, match="year=2024/month=3/day=1 was trained on in part, but its folder is missing"):
        periods.continues((key, (2024, 3, 1)), over=False)
    later = Periods.of(DataSet(path=str(dates), filters=[["month", ">", 2]]), names)
    assert not later.continues((key, (2024, 2, 2)), over=False)
    with pytest.raises(DataError, match=r"set data\.progressive: day, or start"):
        periods.continues(("day", 1), over=True)
    with pytest.raises(DataError, match="month=02 was a string in training, but month=2 is an integer"):
        periods.continues((key, (2024, "02", 1)), over=True)
    with pytest.raises(DataError, match="the newest folder year=…/month=…/day=… is used for evaluation only"):
        periods.next((2024, 9, 30))
    write(dates / "year=2024", [3])
    with pytest.raises(DataError, match="the file is not in a folder month=…"):
        Periods.of(DataSet(path=str(dates)), names)


@pytest.mark.parametrize(
    ("days", "named"),
    [
        (["2024-1-9", "2024-1-10"], "day=2024-1-10 and day=2024-1-9 "),
        (["2024-01-09", "20240110"], "day=2024-01-09 and day=20240110 "),
        (["2024-01-09", "2024-01-10", "newest"], "day=2024-01-09 and day=newest "),
        (["2024-01-09", "2024-01-10"], None),
        (["early", "late"], None),
    ],
)
def test_texts_of_unequal_form_have_no_order_of_time(tmp_path: Path, days: list[str], named: str | None) -> None:
    for day in days:
        write(tmp_path / f"day={day}", [1])
    if named is None:
        assert Periods.of(DataSet(path=str(tmp_path)), "day").values == tuple(days)
        return
    with pytest.raises(DataError, match=f"{named}have different forms.*such as 2024-01-09"):
        Periods.of(DataSet(path=str(tmp_path)), "day")


def test_a_list_of_columns_names_each_once() -> None:
    for wrong in ([], ["day", "day"]):
        with pytest.raises(ValueError, match=r"progressive must name a partition column"):
            DataConfig.model_validate({"train": "x", "progressive": wrong})
    assert DataConfig.model_validate({"train": "x", "progressive": ["year", "day"]}).progressive == ["year", "day"]
