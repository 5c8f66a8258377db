"""What `init` proposes and says of a log: parts of times that the training rows cover, and too few rows of a label."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.public import started

MONDAY = 1_704_067_200  # 2024-01-01 00:00 UTC
HOUR, DAY = 3600, 86_400
ROWS = 4000


def of_log(folder: Path, seconds: Any, click: Any = None) -> tuple[dict[str, Any], list[str]]:
    """The config for a log with these times, and the lines that are printed."""
    rng = np.random.default_rng(0)
    columns = {"user_id": rng.integers(0, 40, len(seconds)), "x": rng.normal(size=len(seconds)), "ts": seconds}
    columns["click"] = rng.integers(0, 2, len(seconds)) if click is None else click
    pq.write_table(pa.table(columns), folder / "x.parquet")
    lines: list[str] = []
    return started(folder / "x.parquet", folder / "a-data", tell=lines.append), lines


def parts(config: dict[str, Any]) -> set[str]:
    return {spec["part"] for spec in config["schema"].get("derived", ()) if spec["kind"] == "time_part"}


@pytest.mark.parametrize("kind", [pa.int64(), pa.timestamp("ms"), pa.timestamp("us", "Asia/Tokyo")])
@pytest.mark.parametrize(
    ("days", "expected"),
    [
        (2, set()),  # the training rows are those of 1.8 days
        (3, {"hour"}),
        (8, {"hour"}),
        (15, {"hour"}),  # 13.5 days in training
        (17, {"hour", "weekday"}),
    ],
)
def test_a_part_of_times_is_proposed_if_the_training_rows_cover_it(
    tmp_path: Path, days: int, expected: set[str], kind: pa.DataType
) -> None:
    seconds = pa.array(MONDAY + np.linspace(0, days * DAY, ROWS).astype(np.int64))
    times = seconds if pa.types.is_integer(kind) else seconds.cast(pa.timestamp("s")).cast(pa.timestamp(kind.unit))
    config, _ = of_log(tmp_path, times.cast(kind))
    assert parts(config) == expected


@pytest.mark.parametrize("kind", [pa.date32(), pa.date64()])
@pytest.mark.parametrize(("days", "expected"), [(13, set()), (20, {"weekday"})])
def test_of_dates_only_the_weekday(tmp_path: Path, days: int, expected: set[str], kind: pa.DataType) -> None:
    dates = pa.array(np.linspace(19_723, 19_723 + days, ROWS).astype(np.int32)).cast(pa.date32()).cast(kind)
    assert parts(of_log(tmp_path, dates)[0]) == expected


def test_a_value_that_no_training_row_has_rules_the_part_out(tmp_path: Path) -> None:
    """Four weeks of a shop that is closed on Sundays and at night, with a Sunday among the evaluation rows."""
    times = MONDAY + np.linspace(0, 28 * DAY, 20_000).astype(np.int64)
    is_open = (times // HOUR % 24 >= 6) & ((times - MONDAY) // DAY % 7 < 6)
    config, _ = of_log(tmp_path, times[is_open | (times > MONDAY + 27 * DAY)])
    assert parts(config) == set()


def test_all_training_rows_count_not_only_the_inspected_ones(tmp_path: Path) -> None:
    """The first half million rows of a sorted file are those of two days; its times are read as a whole."""
    first, later = np.linspace(0, 2 * DAY, 510_000), np.linspace(2 * DAY, 40 * DAY, 200_000)
    config, _ = of_log(tmp_path, MONDAY + np.concatenate([first, later]).astype(np.int64))
    assert parts(config) == {"hour", "weekday"}


@pytest.mark.parametrize("timed", [True, False])
@pytest.mark.parametrize(("share", "label"), [(0.004, 1), (0.996, 0), (0.5, None)])
def test_few_rows_of_a_label_in_the_evaluation_are_told(
    tmp_path: Path, share: float, label: int | None, timed: bool
) -> None:
    click = (np.arange(ROWS) * 7919 % ROWS < share * ROWS).astype(np.int64)
    times = MONDAY + 60 * np.arange(ROWS) if timed else np.random.default_rng(1).normal(size=ROWS)
    _, lines = of_log(tmp_path, times, click)
    told = [line for line in lines if "too few for a reliable AUC" in line]
    if label is None:
        assert not told
    else:
        (line,) = told
        assert f"of its rows have label {label} (click)" in line and "use more rows" in line
        count = int(line.split("about ")[1].split()[0])
        assert 1 <= count <= 2, "0.4 % of a tenth of 4,000 rows"
