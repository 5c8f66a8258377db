"""`rayrec data sequence` orders by time: what is a time, how texts are read, several columns, times of a split."""

from __future__ import annotations

import math
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import Result
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from rayrec.cli import app
from rayrec.data import DataError
from tests.data.histories import write_histories

US = "%m/%d/%Y %I:%M:%S %p"


def sequence(folder: Path, columns: dict[str, Any], *options: str, files: int = 1) -> Result:
    """The command over a log of one user, in one or two files; without options, ordered by `at`."""
    table = pa.table(columns)
    table = table if "user" in columns else table.append_column("user", pa.array(["u"] * len(table)))
    table = table if "item" in columns else table.append_column("item", pa.array(range(len(table))))
    (folder / "log").mkdir(parents=True, exist_ok=True)
    half = -(-len(table) // files)
    for number in range(files):
        pq.write_table(table.slice(number * half, half), folder / "log" / f"{number}.parquet")
    words = ["data", "sequence", str(folder / "log"), "--out", str(folder / "out"), "--user", "user"]
    return CliRunner().invoke(app, [*words, "--column", "item", *(options or ("--time", "at"))])


def rows_of(folder: Path) -> dict[int, list[int]]:
    """By item, in the order of the file: the history."""
    rows = pq.read_table(folder / "impressions-00000.parquet").to_pylist()
    return {row["item"]: row["history_item"] for row in rows}


def refusal(answer: Result) -> DataError:
    assert isinstance(answer.exception, DataError), answer.output
    return answer.exception


def test_an_american_time_is_ordered_by_its_format_and_refused_without(tmp_path: Path) -> None:
    at = ["11/9/2019 9:05:58 AM", "11/10/2019 8:00:00 AM", "11/10/2019 1:00:00 PM", "11/10/2019 11:00:00 AM"]
    error = refusal(sequence(tmp_path, {"at": at}, files=2))
    assert (error.row, error.value, Path(error.file or "").name) == (0, "'11/9/2019 9:05:58 AM'", "0.parquet")
    assert "--time 'at=FORMAT'" in (error.fix or "")
    answer = sequence(tmp_path, {"at": at}, "--time", f"at={US}", files=2)
    assert answer.exit_code == 0, answer.output
    assert rows_of(tmp_path / "out") == {0: [], 1: [0], 3: [0, 1], 2: [0, 1, 3]}
    written = pq.read_table(tmp_path / "out" / "impressions-00000.parquet")
    assert written["at"].type == pa.timestamp("us") and written["at"][2].as_py() == datetime(2019, 11, 10, 11)


def test_the_first_value_that_does_not_parse_is_named_with_its_file_and_row(tmp_path: Path) -> None:
    at = ["2024-01-02", "2024-01-01 08:00", "2024-02-30", "later"]
    error = refusal(sequence(tmp_path, {"at": at}, files=2))
    assert (error.row, error.value, Path(error.file or "").name) == (0, "'2024-02-30'", "1.parquet")
    error = refusal(sequence(tmp_path, {"at": ["01.02.2024", "2024-02-01"]}, "--time", "at=%d.%m.%Y"))
    assert (error.row, error.value) == (1, "'2024-02-01'") and "%d.%m.%Y" in error.problem


@pytest.mark.parametrize(
    ("at", "bad"),
    [
        (["2024-01-01T08:00Z", "2024-01-01T09:00"], "'2024-01-01T09:00'"),
        (["2024-01-01T09:00", "2024-01-02", "2024-01-01T08:00+01:00"], "'2024-01-01T08:00+01:00'"),
        (["9", "10", "2024"], None),
        (["9", "10", "2024-01-01"], "'2024-01-01'"),
        (["2024-01-01", "9"], "'9'"),
        (["1e9", "2e9"], "'1e9'"),
        (["9", ""], "''"),
        (["99999999999999999999"], "'99999999999999999999'"),
        (["nan"], "'nan'"),
    ],
)
def test_texts_of_several_kinds_do_not_mix(tmp_path: Path, at: list[str], bad: str | None) -> None:
    answer = sequence(tmp_path, {"at": at})
    if bad is None:
        assert answer.exit_code == 0
        return
    error = refusal(answer)
    assert error.value == bad and error.row == at.index(bad.strip("'"))


@pytest.mark.parametrize("nothing", [None, math.nan])
@pytest.mark.parametrize("column", ["at", "user"])
def test_a_null_and_a_nan_are_refused_with_the_row(tmp_path: Path, nothing: float | None, column: str) -> None:
    columns: dict[str, Any] = {"at": [1.0, 2.0, 3.0, 4.0], "user": [1.0, 1.0, 1.0, 1.0]}
    columns[column][3] = nothing
    columns = {name: pa.array(values, from_pandas=False) for name, values in columns.items()}
    error = refusal(sequence(tmp_path, columns, files=2))
    assert "null or NaN in 1 of 4 rows" in error.problem
    assert (error.column, error.row, Path(error.file or "").name) == (column, 1, "1.parquet")


@pytest.mark.parametrize(
    "array",
    [
        pa.array([1.0, math.inf]),
        pa.array([True, False]),
        pa.array([[1], [2]]),
        pa.array([1, 2], pa.time32("s")),
        pa.array([1, 2], pa.duration("s")),
        pa.array([b"\xff", b"1"]),
        pa.nulls(2),
    ],
    ids=str,
)
def test_what_is_no_time_is_refused(tmp_path: Path, array: pa.Array) -> None:
    error = refusal(sequence(tmp_path, {"at": array}))
    assert error.column == "at" and error.fix


@pytest.mark.parametrize(
    "array",
    [
        pa.array([3, 1, 2], pa.uint64()),
        pa.array([3, 1, 2], pa.float16()),
        pa.array([3, 1, 2], pa.date32()),
        pa.array([3, 1, 2], pa.timestamp("ns", "Europe/Paris")),
        pa.array([Decimal("10.5"), Decimal("9.5"), Decimal("9.75")]),
        pa.array(["10.5", "9.5", "9.75"]),
        pa.array(["10", "-9", "9"]).dictionary_encode(),
        pa.array([b"10", b"8", b"9"]),
        pa.array(["10", "8", "9"], pa.string_view()),
        pa.array(["2024-01-01T09:00+01:00", "2024-01-01T07:00Z", "2024-01-01T09:30+02:00"]),
        pa.array(["2024-01-01 10:00:00.123456789", "2024-01-01 10:00:00.123456787", "2024-01-01 10:00:00.123456788"]),
    ],
    ids=lambda array: f"{array.type}-{array[0]}",
)
def test_every_kind_of_time_orders(tmp_path: Path, array: pa.Array) -> None:
    answer = sequence(tmp_path, {"at": array})
    assert answer.exit_code == 0, answer.exception
    assert rows_of(tmp_path / "out") == {1: [], 2: [1], 0: [1, 2]}


def test_the_second_time_orders_rows_of_one_time_by_the_first(tmp_path: Path) -> None:
    day, order = ["2024-03-21", "2024-03-21", "2024-03-29", "2024-03-25", "2024-03-21"], [2, 1, 1, 1, 1]
    answer = sequence(tmp_path, {"day": day, "order": order}, "--time", "day", "--time", "order")
    assert answer.exit_code == 0, answer.exception
    assert rows_of(tmp_path / "out") == {1: [], 4: [], 0: [1, 4], 3: [1, 4, 0], 2: [1, 4, 0, 3]}
    written = pq.read_table(tmp_path / "out" / "impressions-00000.parquet").to_pylist()
    assert written[2]["history_order"] == [1, 1] and len(written[2]["history_day"]) == 2
    clock = {"day": day, "clock": ["23:00", "9:30", "0:10", "0:00", "10:00"]}
    answer = sequence(tmp_path / "clock", clock, "--time", "day", "--time", "clock=%H:%M")
    assert answer.exit_code == 0, answer.exception
    assert rows_of(tmp_path / "clock" / "out") == {1: [], 4: [1], 0: [1, 4], 3: [1, 4, 0], 2: [1, 4, 0, 3]}
    error = refusal(sequence(tmp_path, clock, "--time", "clock=%H:%M", "--time", "day"))
    assert "no year" in error.problem
    error = refusal(sequence(tmp_path, clock, "--time", "day", "--time", "day"))
    assert error.column == "day"


def test_an_option_with_one_value_is_refused_when_it_is_repeated(tmp_path: Path) -> None:
    """The last one would replace the first without a word."""
    for option in ("--user", "--length", "--split"):
        value = {"--user": "item", "--length": "3", "--split": "position"}[option]
        answer = sequence(tmp_path, {"at": [1, 2]}, "--time", "at", option, value, option, value)
        assert answer.exit_code == 2 and option in answer.output and "has one value" in answer.output


def test_whole_numbers_have_a_format_too(tmp_path: Path) -> None:
    """CSV and JSON lines make numbers of digits, without the zeros before them."""
    day = [1122019, 30112019, 9112019, 10112019]
    answer = sequence(tmp_path, {"day": day}, "--time", "day=%d%m%Y")
    assert answer.exit_code == 0, answer.exception
    assert rows_of(tmp_path / "out") == {2: [], 3: [2], 1: [2, 3], 0: [2, 3, 1]}
    error = refusal(sequence(tmp_path, {"day": ["9112019", "1122019"]}, "--time", "day=%d%m%Y"))
    assert error.value == "'9112019'"  # as texts it may be the ninth of November, or the ninth of the eleventh month
    error = refusal(sequence(tmp_path, {"day": [1.5, 2.5]}, "--time", "day=%d%m%Y"))
    assert "not double" in error.problem


@pytest.mark.parametrize(
    ("written", "problem"),
    [
        ("", "no directive"),
        ("day", "no directive"),
        ("%q", "%q is not supported"),
        ("%Y-%m-%d %H:%M %Z", "use %z"),
        ("%Y %", "is not supported"),
        ("%m/%d/%Y %I:%M", "need each other"),
        ("%m/%d/%Y %H:%M %p", "need each other"),
        ("%Y %U", "ignores"),
    ],
)
def test_formats_that_would_read_other_times_are_refused(tmp_path: Path, written: str, problem: str) -> None:
    answer = sequence(tmp_path, {"at": ["2024-01-01"]}, "--time", f"at={written}")
    assert answer.exit_code and problem in " ".join(f"{answer.output} {answer.exception}".replace("│", " ").split())


SPLITS = [
    # times, options of the time, the first test time, one that is refused
    (["11/9/2019", "12/1/2019", "2/1/2020"], "at=%m/%d/%Y", "12/1/2019", "2019-12-01"),
    (["2019-11-09", "2019-12-01", "2020-02-01"], "at", "2019-12-01", "12/1/2019"),
    (["2019-11-09", "2019-12-01", "2020-02-01"], "at", "2019-12-01T00:00", "2019-12-01T00:00Z"),
    (["2019-11-09T00:00Z", "2019-12-01T00:00Z", "2020-02-01T00:00Z"], "at", "2019-12-01", "1575158400"),
    ([date(2019, 11, 9), date(2019, 12, 1), date(2020, 2, 1)], "at", "2019-12-01", "20191201"),
    (["20191109", "20191201", "20200201"], "at=yyyymmdd", "20191201", "2019-12-01"),
    ([19110923, 19120100, 20020101], "at=yymmddhh", "19120100", "20191201"),
    ([1573257600, 1575158400, 1580515200], "at=s", "1575158400", "2019-12-01"),
    (["2019-11-09", "2019-12-01", "2020-02-01"], "at=iso", "2019-12-01", "12/1/2019"),
    (["9", "10", "11"], "at", "10", "ten"),
    (["9", "10", "11"], "at", "10", "1_0"),
    ([-3, -2, 11], "at", "-2", "nan"),
    ([0.25, 0.5, 11], "at", "0.5", "inf"),
    ([9, 10, 11], "at", "9.5", "2019-12-01"),
]


@pytest.mark.parametrize(("at", "time", "first", "refused"), SPLITS, ids=[str(split[1:3]) for split in SPLITS])
def test_times_of_a_split_are_read_as_the_column_is(
    tmp_path: Path, at: list[Any], time: str, first: str, refused: str
) -> None:
    answer = sequence(tmp_path, {"at": at}, "--time", time, "--split", "time", "--test-from", refused)
    error = refusal(answer)
    assert repr(refused) in error.problem and error.column == "at" and "e.g." in (error.fix or "")
    assert not (tmp_path / "out").exists()
    answer = sequence(tmp_path, {"at": at}, "--time", time, "--split", "time", "--test-from", first)
    assert answer.exit_code == 0, answer.exception
    assert rows_of(tmp_path / "out" / "train") == {0: []}
    assert rows_of(tmp_path / "out" / "test") == {1: [0], 2: [0, 1]}


def test_a_validation_that_no_time_can_be_in_is_refused(tmp_path: Path) -> None:
    options = ["--time", "at", "--split", "time", "--test-from", "2", "--validation-from", "3"]
    assert "'validation' is empty" in refusal(sequence(tmp_path, {"at": [1, 2, 3]}, *options)).problem


FORMATS: dict[str, tuple[timedelta, Any]] = {
    # format: its resolution, and how a time is written
    US: (timedelta(seconds=1), None),
    "%d.%m.%Y": (timedelta(days=1), None),
    "%d%b%y:%H:%M": (timedelta(minutes=1), None),
    "%Y%m%d%H%M%S%f": (timedelta(microseconds=1), None),
    "%d/%m/%Y %H:%M:%S %z": (timedelta(seconds=1), None),
    "ISO": (timedelta(microseconds=1), lambda time: time.replace(tzinfo=None).isoformat()),
    "ISO date": (timedelta(days=1), lambda time: time.date().isoformat()),
    "ISO zoned": (timedelta(microseconds=1), lambda time: time.isoformat(" ")),
    "digits": (timedelta(seconds=1), lambda time: str(int(time.timestamp()))),
    "digits, decimals": (timedelta(milliseconds=1), lambda time: f"{int(time.timestamp() * 1000) / 1000}"),
}
START = datetime(1980, 1, 1, tzinfo=UTC)
moments = st.builds(
    lambda us, hours: (START + timedelta(microseconds=us)).astimezone(timezone(timedelta(hours=hours))),
    st.one_of(st.integers(0, 30), st.integers(0, 30 * 86_400_000_000), st.integers(0, 40 * 365 * 86_400_000_000)),
    st.integers(-11, 13),
)


@settings(max_examples=40)
@given(st.sampled_from(list(FORMATS)), st.lists(moments, min_size=1, max_size=12))
def test_the_order_is_that_of_the_real_times_and_no_row_sees_a_later_one(
    tmp_path_factory: pytest.TempPathFactory, name: str, drawn: list[datetime]
) -> None:
    step, write = FORMATS[name]
    zoned = name == "ISO zoned" or "%z" in name
    drawn = drawn if zoned else [time.astimezone(UTC) for time in drawn]
    texts = [time.strftime(name) if write is None else write(time) for time in drawn]
    real = [(time - START) // step for time in drawn]
    folder = tmp_path_factory.mktemp("drawn")
    users = [index % 2 for index in range(len(drawn))]
    table = pa.table({"user": users, "item": range(len(drawn)), "at": texts})
    pq.write_table(table, folder / "log.parquet")
    how = {"time_format": name if write is None else None}
    write_histories(folder / "log.parquet", folder / "out", **how)
    found = rows_of(folder / "out")
    assert list(found) == sorted(range(len(drawn)), key=lambda row: (real[row], row))
    for row, history in found.items():
        before = [other for other in range(len(drawn)) if users[other] == users[row] and real[other] < real[row]]
        assert history == sorted(before, key=lambda other: (real[other], other))
    if len(set(real)) > 1:  # a split at any of the times, written as the column's times are
        latest = max(range(len(drawn)), key=lambda row: real[row])
        counts = write_histories(folder / "log.parquet", folder / "split", split=(texts[latest],), **how)
        assert counts[folder / "split" / "test"] == sum(time == real[latest] for time in real)


def test_a_library_call_takes_numbers_as_times_of_a_split(tmp_path: Path) -> None:
    pq.write_table(pa.table({"user": [1, 1, 1], "item": [1, 2, 3], "at": [1, 2, 3]}), tmp_path / "log.parquet")
    counts = write_histories(tmp_path / "log.parquet", tmp_path / "out", split=(3, 1.5))
    assert [folder.name for folder in counts] == ["train", "validation", "test"]
