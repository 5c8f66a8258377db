"""The time of a row is recognized by its values, asked for where it is not sure, and given by `--time`."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest

from rayrec.cli import run
from rayrec.data import DataError, inspect
from tests.data.public import started

ROWS = 400
FIRST = datetime(2014, 10, 1, 0, 30, tzinfo=UTC)
MOMENTS = [FIRST + timedelta(hours=5 * n) for n in range(ROWS)]
SECONDS = np.array([int(moment.timestamp()) for moment in MOMENTS])


def texts(time_format: str) -> list[str]:
    return [moment.strftime(time_format) for moment in MOMENTS]


def digits(time_format: str) -> list[int]:
    return [int(text) for text in texts(time_format)]


def columns(**more: Any) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    ids = {"user": rng.integers(0, 40, ROWS), "item": rng.integers(0, 30, ROWS)}
    return {**ids, **more, "click": rng.integers(0, 2, ROWS)}


def found(folder: Path, option: str | None = None, **more: Any) -> Any:
    pq.write_table(pa.table(columns(**more)), folder / "x.parquet")
    return inspect(str(folder), label="click", time=option)


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("showTime", SECONDS * 1000, "ms"),
        ("unixReviewTime", SECONDS, "s"),
        ("时间戳", SECONDS * 10**6, "us"),
        ("c3", SECONDS * 1000, "ms"),  # sorted
        ("c3", np.random.default_rng(0).permutation(SECONDS), "s"),  # spread
        ("date", digits("%Y%m%d"), "yyyymmdd"),
        ("c3", digits("%Y%m%d"), "yyyymmdd"),
        ("time", digits("%Y%m%d%H%M%S"), "yyyymmddhhmmss"),
        ("hour", digits("%y%m%d%H"), "yymmddhh"),
        ("c3", texts("%Y-%m-%dT%H:%M:%S.5+00:00"), "iso"),
        ("at", texts("%m/%d/%Y %I:%M:%S %p"), "%m/%d/%Y %I:%M:%S %p"),
        ("day", texts("%d.%m.%Y"), "%d.%m.%Y"),
    ],
)
def test_times_are_recognized_by_their_values(tmp_path: Path, name: str, values: Any, expected: str) -> None:
    inspection = found(tmp_path, **{name: values})
    assert inspection.time is not None and (inspection.time.column, inspection.time.format) == (name, expected)
    facts = next(c for c in inspection.columns if c.name == name)
    assert facts.role == ("timestamp" if expected in ("s", "ms", "us") else "unused")
    folder = tmp_path / "d"
    said: list[str] = []
    config = started(tmp_path / "x.parquet", folder, "click", said.append)
    assert f"the last rows by {name!r}" in said[0]
    if facts.role == "timestamp":
        assert config["schema"]["timestamp"].get("unit", "s") == expected
        assert config["data"]["train"]["filters"][0][:2] == [name, "<"]
    else:
        times = [inspection.time.seconds(pq.read_table(config["data"][side])) for side in ("train", "eval")]
        assert times[0].max() < times[1].min() and 0.05 * ROWS <= len(times[1]) <= 0.2 * ROWS
        features = [*config["schema"]["sparse"], *config["schema"]["dense"]]
        assert [feature["name"] for feature in features] == ["user", "item"]


@pytest.mark.parametrize(
    "expected",
    ["%m/%d/%Y %I:%M %p", "%d-%m-%Y %H:%M:%S", "%Y-%m-%d %I:%M:%S %p", "%d-%b-%Y %H:%M:%S.%f", "%b %d, %Y %I:%M %p",
     "%d %B %Y", "%m/%d/%y %H:%M", "%Y.%m.%d %H:%M", "%a, %d %b %Y %H:%M:%S +0000"],
)  # fmt: skip
def test_texts_of_any_order_of_day_and_month_are_times(tmp_path: Path, expected: str) -> None:
    inspection = found(tmp_path, ordered_at=texts(expected))
    assert inspection.time is not None and inspection.time.format == expected.replace("+0000", "%z")
    seconds = inspection.time.seconds(pq.read_table(tmp_path / "x.parquet"))
    wanted = [datetime.strptime(text, expected) for text in texts(expected)]
    assert seconds.tolist() == [int((moment - datetime(1970, 1, 1)).total_seconds()) for moment in wanted]


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("order_id", SECONDS),  # ids
        ("app_version", [f"{n % 9 + 1}.{n % 7 + 1}.{n % 5 + 10}" for n in range(ROWS)]),
        ("c3", np.random.default_rng(0).integers(10**8, 4 * 10**9, ROWS)),  # numbers of that size
        ("c3", np.random.default_rng(0).choice(SECONDS[:30], ROWS)),  # values that repeat, in no order
        ("c3", np.random.default_rng(0).integers(10_000_000, 99_999_999, ROWS)),  # no dates
        ("play_time_ms", np.random.default_rng(0).integers(0, 90_000, ROWS)),
        ("title", [f"title {n % 90}" for n in range(ROWS)]),
        ("version", [f"{n % 9}.{n % 7}.{n % 5}" for n in range(ROWS)]),
    ],
)
def test_other_numbers_and_texts_are_no_times(tmp_path: Path, name: str, values: Any) -> None:
    assert found(tmp_path, **{name: values}).time is None


def test_times_of_a_user_or_an_item_are_asked_for(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    item = columns()["item"]
    inspection = found(tmp_path, published_at=SECONDS[item], birth_date=digits("%Y%m%d"), c3=rng.permutation(SECONDS))
    assert inspection.time is not None and inspection.time.column == "c3"
    inspection = found(tmp_path, shown=SECONDS[item], birth_date=digits("%Y%m%d"))
    assert inspection.time is None
    assert [question.partition(":")[0] for question in inspection.questions] == ["shown", "birth_date"]
    assert "--time 'birth_date=yyyymmdd'" in inspection.questions[1]
    both = [text.replace("/1", "/0") for text in texts("%d/%m/%Y") if text[:2] < "13"]
    ambiguous = (both * ROWS)[:ROWS]
    assert found(tmp_path, seen=ambiguous).time is None
    many = [(FIRST + timedelta(minutes=14 * n)).strftime("%m/%d/%Y %I:%M %p") for n in range(1500)]
    pq.write_table(pa.table({"seen": many, "item": [0, 1, 2] * 500, "click": [0, 1] * 750}), tmp_path / "x.parquet")
    clear = inspect(str(tmp_path), label="click").time
    assert clear is not None and clear.format == "%m/%d/%Y %I:%M %p", "the first thousand lie before the 13th"
    odd = [*texts("%m/%d/%Y")[:-1], "21/13/2019"]
    assert "--time 'seen=%m/%d/%Y'" in found(tmp_path, seen=odd).questions[0]


def test_a_random_split_is_told_and_stands_in_the_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pacsv.write_csv(pa.table(columns(shown=SECONDS[columns()["item"]])), "x.csv")
    assert run(["init", "x.csv", "--label", "click"]) == 0
    told = capsys.readouterr().out
    assert "in a log, a random split overstates the metrics" in told and "--time 'shown=s'" in told
    head = [line for line in Path("x.yaml").read_text().splitlines() if line.startswith("#")]
    assert any("a tenth of the rows by a hash" in line for line in head)
    assert any("--time COLUMN[=FORMAT]" in line for line in head)
    assert run(["init", "x.csv", "--label", "click", "--name", "y", "--time", "shown=s"]) == 0
    assert "the last rows by 'shown'" in capsys.readouterr().out
    assert "a random split" not in Path("y.yaml").read_text()


def test_the_time_is_what_the_user_says(tmp_path: Path) -> None:
    more = {"a=b": SECONDS, "when": texts("%d %b %y"), "ts": SECONDS, "day": pa.array(MOMENTS, pa.timestamp("s"))}
    for option, column, time_format in [
        ("a=b", "a=b", "s"),
        ("a=b=s", "a=b", "s"),
        ("when=%d %b %y", "when", "%d %b %y"),
        ("day", "day", ""),
    ]:
        time = found(tmp_path, option, **more).time
        assert time is not None and (time.column, time.format) == (column, time_format)
        assert (time.seconds(pq.read_table(tmp_path / "x.parquet")) // 86_400).tolist() == (SECONDS // 86_400).tolist()
    for option, problem in [
        ("Day", "did you mean 'day'"),
        ("when", "the format of the times is not clear; the first value is '01 Oct 14'"),
        ("when=%d/%m/%Y", "'01 Oct 14' is not a time in the format '%d/%m/%Y'"),
        ("ts=hours", "unknown format 'hours'"),
        ("day=s", "needs no format"),
    ]:
        with pytest.raises(DataError, match=problem) as caught:
            found(tmp_path, option, **more)
        assert caught.value.fix
    with pytest.raises(DataError, match=f"null in 1 of {ROWS} rows"):
        found(tmp_path, "c=yyyymmdd", c=[*digits("%Y%m%d")[:-1], None])


def test_digits_that_are_no_date_are_refused(tmp_path: Path) -> None:
    for value in (20230229, 20231301, 20230100, 230101, 220230101):
        with pytest.raises(DataError, match=f"{value} is not a time"):
            found(tmp_path, "c=yyyymmdd", c=[*digits("%Y%m%d")[:-1], value])


@pytest.mark.parametrize("time", ["timestamp", "time_ms"])
def test_ids_of_periods_are_left_out(tmp_path: Path, time: str) -> None:
    """In a log that is split by time, the days of the evaluation rows have no trained vectors."""
    shuffled = np.random.default_rng(1).permutation(ROWS)
    columns = {
        time: SECONDS * 1000,
        "day": digits("%Y%m%d"),
        "week": np.array(texts("week %W")),
        "hour": [moment.hour for moment in MOMENTS],
        "session_id": np.arange(ROWS) // 10,
        "release": np.arange(ROWS) // 10,
        "since_launch": (SECONDS - SECONDS[0]) // 86_400,
    }
    mixed = {name: np.array(values)[shuffled] for name, values in columns.items()}
    facts = {c.name: c for c in found(tmp_path, **mixed).columns}
    assert facts["day"].role == "unused" and "time" in facts["day"].note
    for name, option in (("week", "--ids"), ("release", "--ids"), ("since_launch", "--numbers")):
        assert facts[name].role == "unused" and "another form of the time?" in facts[name].note, name
        assert f"{option} {name}" in facts[name].note
    assert {facts[name].role for name in ("user", "item", "hour", "session_id")} <= {"id", "group"}
    told = inspect(str(tmp_path), label="click", roles={"ids": ["release"]})
    assert {c.name: c.role for c in told.columns}["release"] == "id"
