"""Times in texts and numbers have one parser: of CSV cells, of `rayrec init --time`, and of `rayrec data sequence`."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta, timezone

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data import DataError
from rayrec.data.arrays.times import check_format, parse_times, row_seconds, write_time
from rayrec.data.formats.text_cells import CellError, times
from rayrec.data.mapping.problems import InMemory
from rayrec.data.tools.init.times import read_seconds
from rayrec.data.tools.times import TimeColumn, read_times

FORMATS = {
    # format: its resolution in microseconds
    "s": 10**6,
    "ms": 1000,
    "us": 1,
    "ns": 1,
    "yyyymmdd": 86_400 * 10**6,
    "yyyymmddhh": 3600 * 10**6,
    "yyyymmddhhmm": 60 * 10**6,
    "yyyymmddhhmmss": 10**6,
    "yymmddhh": 3600 * 10**6,
    "excel": 1000,
    "iso": 1,
    "%m/%d/%Y %I:%M:%S %p": 10**6,
    "%d.%m.%Y": 86_400 * 10**6,
    "%d%m%Y": 86_400 * 10**6,
    "%d%b%y:%H:%M": 60 * 10**6,
    "%Y%m%d%H%M%S%f": 1,
    "%F %T": 10**6,
    "%d/%m/%Y %H:%M:%S %z": 10**6,
}
# yymmddhh and %y are years from 2001 to 2068 here: POSIX reads 69 as 1969.
seconds = st.integers(978_307_200, 3_124_224_000 - 1)
moments = st.builds(lambda s, us: s * 10**6 + us, seconds, st.integers(0, 999_999))
a_format = st.sampled_from(list(FORMATS))


def timestamps(micros: list[int], time_format: str) -> pa.Array:
    step = FORMATS[time_format]
    zone = "UTC" if time_format.endswith("%z") else None
    return pa.array([value // step * step for value in micros], pa.timestamp("us", zone))


def texts_of(micros: list[int], time_format: str) -> pa.Array:
    return pa.array([write_time(time, time_format) for time in timestamps(micros, time_format)])


def by_init(values: pa.Array, time_format: str) -> pa.Array:
    return pa.array(read_seconds(values, time_format, "at").astype("datetime64[s]"))


def by_sequence(values: pa.Array, time_format: str) -> pa.Array:
    return read_times(TimeColumn("at", time_format), values, InMemory(), first=True).values


def by_cell(values: pa.Array, time_format: str) -> pa.Array:
    return times(time_format)(values)


READERS: list[Callable[[pa.Array, str], pa.Array]] = [by_init, by_sequence, by_cell]


@given(a_format, st.lists(moments, min_size=1, max_size=8))
def test_written_times_are_read_as_they_were_by_all_readers(time_format: str, micros: list[int]) -> None:
    expected, texts = timestamps(micros, time_format), texts_of(micros, time_format)
    assert parse_times(texts, time_format).cast(expected.type).equals(expected)
    in_seconds = expected.cast(pa.timestamp("s"), safe=False)
    for read in READERS:
        assert read(texts, time_format).cast(pa.timestamp("s"), safe=False).equals(in_seconds)
    if texts[0].as_py().isdigit():
        numbers = texts.cast(pa.int64()) if time_format != "%Y%m%d%H%M%S%f" else None
        if numbers is not None:
            assert parse_times(numbers, time_format).cast(expected.type).equals(expected)
        padded = pa.array([f"  {text} " for text in texts.to_pylist()])
        assert parse_times(padded, time_format).cast(expected.type).equals(expected)


BAD = [
    *(
        "",
        "x",
        "31.02.2019",
        "2019-02-31",
        "20190231",
        "1122019",
        "19023124",
        "١٢.١٢.٢٠١٩",
        "1_000",
        "01.02.20195",
        "-1",
    ),
    *(
        "-1",
        "nan",
        "inf",
        "1e9",
        "2019-1-1",
        "2019-01-01 24:01",
        "2019-01-01 23:58:60",
        "2019-01-01 24:00:00.5",
        "2019-01-01 00:00:00+25:00",
    ),
    *("2/30/2019 1:00:00 AM", "2/3/2019 13:00:00 AM", "7258118400", "99999999999999999999"),
]


@given(a_format, st.lists(moments, min_size=0, max_size=5), st.lists(st.sampled_from(BAD), min_size=1, max_size=2))
def test_the_first_bad_value_is_named_by_all_readers(time_format: str, micros: list[int], bad: list[str]) -> None:
    good = texts_of(micros, time_format)
    bad = [text for text in bad if row_seconds(pa.array([text]), time_format)[0] < 0]
    values = pa.array([*good.to_pylist(), *bad], pa.string())
    missing = parse_times(values, time_format).is_null().to_pylist()
    if not any(missing):
        return  # in range for another reader, as year 1 of a text
    first = values[missing.index(True)].as_py()
    with pytest.raises(DataError) as by_time:
        by_init(values, time_format)
    assert repr(first) in by_time.value.problem
    with pytest.raises(DataError) as by_log:
        by_sequence(values, time_format)
    assert by_log.value.value == repr(first)
    with pytest.raises(CellError, match="does not have the time format") as by_text:
        by_cell(values, time_format)
    assert by_text.value.index == missing.index(True)


@pytest.mark.parametrize("text", BAD)
def test_no_format_reads_a_bad_time_of_its_kind(text: str) -> None:
    """Arrow's own parser reads 31.02.2019 as 3 March, and 1122019 by %d%m%Y as 11 February."""
    for time_format in FORMATS:
        if time_format in ("us", "ns", "ms") and text.isascii() and text.isdigit():
            continue
        known = {"s": ("1122019", "19023124", "20190231")}
        if text not in known.get(time_format, ()):
            assert row_seconds(pa.array([text]), time_format)[0] == -1, time_format


@given(st.lists(st.tuples(moments, st.booleans(), st.integers(-11, 13)), min_size=2, max_size=8))
def test_a_zone_stands_in_all_texts_or_in_none(drawn: list[tuple[int, bool, int]]) -> None:
    start = datetime(1970, 1, 1, tzinfo=UTC)
    times_of = [start + timedelta(microseconds=micros) for micros, _, _ in drawn]
    texts = [
        time.astimezone(timezone(timedelta(hours=hours))).isoformat(" ") if zoned else time.isoformat()[:-6]
        for time, (_, zoned, hours) in zip(times_of, drawn, strict=True)
    ]
    zoned = [of_one for _, of_one, _ in drawn]
    parsed = parse_times(pa.array(texts), "iso")
    assert parsed.is_valid().to_pylist() == [of_one == zoned[0] for of_one in zoned]
    kept = [time for time, of_one in zip(times_of, zoned, strict=True) if of_one == zoned[0]]
    assert parsed.drop_null().cast(pa.timestamp("us", "UTC")).to_pylist() == kept
    if len(set(zoned)) > 1:
        other = repr(texts[zoned.index(not zoned[0])])
        with pytest.raises(DataError, match="is not a time"):
            by_init(pa.array(texts), "iso")
        with pytest.raises(DataError) as caught:
            by_sequence(pa.array(texts), "iso")
        assert caught.value.value == other


def test_texts_of_iso_8601_as_programs_write_them() -> None:
    texts = ["2024-01-01 08:00:00 UTC", "2024-01-01T08:00Z", "2024-01-01 10:00:00,000 +02:00", "2024-01-01 10+02"]
    assert row_seconds(pa.array(texts), "iso").tolist() == [1_704_096_000] * 4
    nanoseconds = parse_times(pa.array(["2024-01-01 08:00:00.123456789", "2024-01-01"]), "iso")
    assert nanoseconds.type == pa.timestamp("ns") and nanoseconds.cast(pa.int64())[0].as_py() % 10**9 == 123456789


@pytest.mark.parametrize(
    ("text", "time_format", "expected"),
    [
        ("2016-12-31 23:59:60", "iso", datetime(2017, 1, 1)),
        ("2016-12-31T23:59:60.5Z", "iso", datetime(2017, 1, 1, 0, 0, 0, 500_000, tzinfo=UTC)),
        ("2024-02-28T24:00Z", "iso", datetime(2024, 2, 29, tzinfo=UTC)),
        ("2023-12-31 24:00:00,000", "iso", datetime(2024, 1, 1)),
        ("31.12.2016 23:59:60", "%d.%m.%Y %H:%M:%S", datetime(2017, 1, 1)),
        ("31.12.2023 24:00", "%d.%m.%Y %H:%M", datetime(2024, 1, 1)),
        ("[31/Dec/2023:24:00:00 +0100]", "[%d/%b/%Y:%H:%M:%S %z]", datetime(2023, 12, 31, 23, tzinfo=UTC)),
        ("2024-01-01 12:24:00", "iso", datetime(2024, 1, 1, 12, 24)),
        ("45261.75", "excel", datetime(2023, 12, 1, 18)),
    ],
)
def test_the_end_of_a_day_leap_seconds_and_days_of_spreadsheets(
    text: str, time_format: str, expected: datetime
) -> None:
    zone = None if expected.tzinfo is None else "UTC"
    others = pa.array([text, None, text, text.replace("2", "0")])
    parsed = parse_times(others, time_format).cast(pa.timestamp("us", zone))
    assert parsed[:3].to_pylist() == [expected, None, expected]


def test_numbers_of_every_kind() -> None:
    for values in (
        pa.array([1.5, 1e9, np.nan, np.inf, -1.0]),
        pa.array([1.5, 1e9, None, None, -1.0]).cast(pa.decimal128(20, 4)),
        pa.array(["1.5", "1000000000", "nan", "inf", "-1"]),
        pa.array([b"1.5", b"1000000000", b"\xff", b"inf", b"-1"]).dictionary_encode(),
    ):
        assert row_seconds(values, "s").tolist() == [1, 10**9, -1, -1, -1]
    assert row_seconds(pa.array([2**64 - 1, 5], pa.uint64()), "s").tolist() == [-1, 5]
    assert parse_times(pa.array([1122019]), "%d%m%Y").to_pylist() == [datetime(2019, 12, 1)]
    assert parse_times(pa.array([True]), "iso").null_count == 1


def test_nulls_stay_nulls() -> None:
    for time_format in FORMATS:
        assert parse_times(pa.array([None, None], pa.string()), time_format).null_count == 2
        assert by_cell(pa.array([None], pa.string()), time_format).null_count == 1


@pytest.mark.parametrize("wrong", ["", "day", "%q", "%c", "%Y-%m-%d %Z", "%I:%M", "%Y %U", "yyyy"])
def test_unknown_formats_are_refused(wrong: str) -> None:
    with pytest.raises(ValueError):
        check_format(wrong)
    for time_format in FORMATS:
        check_format(time_format)
