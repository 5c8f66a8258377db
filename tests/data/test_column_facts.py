"""What is made of single columns, in numbers: ranges, estimates, transforms, sizes of tables."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from rayrec.data.tools.init.column_facts import ColumnFacts, column_facts, time_unit
from rayrec.data.tools.init.proposal import propose


def facts(name: str, values: Any, kind: pa.DataType | None = None, share: float = 1.0, **more: Any) -> ColumnFacts:
    return column_facts(name, pa.chunked_array([pa.array(values, kind)]), share, **more)


def test_ids() -> None:
    ids = facts("user_id", [7, 7, 9, None, 30])
    assert (ids.role, ids.nulls, ids.values, ids.distinct, ids.ids_estimate) == ("id", 1, 5, 3, 3)
    assert (ids.low, ids.high, ids.longest, ids.width) == (7, 30, None, 1)
    assert ids.values_seen is not None and ids.values_seen.to_pylist() == [7, 9, 30]
    assert not ids.dense_range  # 30 is not below 8 * 3
    assert ids.table_rows == 16  # the least
    assert replace(ids, values_seen=None) == ids  # the looked-at ids are no part of what is told
    near = facts("user_id", [7, 7, 9, 23])
    assert near.dense_range and near.table_rows == 24 + 8  # room for later ids
    assert replace(near, high=99, ids_estimate=50).table_rows == 100 + 24


@pytest.mark.parametrize(
    ("values", "share", "estimate"),
    [
        ([1, 2, 3, 4, 4, 5, 5], 0.1, 5 + 3 * 3 / (2 * 2)),  # 3 seen once, 2 twice
        ([1, 2, 3, 4], 0.1, 4 + 4 * 3 / 2),  # none twice
        ([1, 2, 3, 4], 0.5, 4 + 4),  # of half of the rows, at most as many again
        ([7, 7, 7], 0.1, 1),
        ([], 0.1, 1),
    ],
)
def test_how_many_ids_to_expect(values: list[int], share: float, estimate: float) -> None:
    found = facts("item_id", values, pa.int64(), share)
    assert (found.distinct, found.ids_estimate) == (len(set(values)), int(estimate))


@pytest.mark.parametrize(("estimate", "rows"), [(8, 16), (9, 32), (1000, 2048), (1024, 2048), (1025, 4096)])
def test_tables_of_hashed_ids_have_room_for_twice_as_many(estimate: int, rows: int) -> None:
    assert ColumnFacts("c", "string", "id", 0, 9, 9, estimate, None, None, None).table_rows == rows


def test_lists() -> None:
    lists = facts("tags", [[1, 2, 3], [], [2]])
    assert (lists.role, lists.values, lists.distinct, lists.longest) == ("id_list", 4, 3, 3)
    fixed = facts("vector", [[0.5, 1.5], [1.0, 3.0]])
    assert (fixed.role, fixed.width, fixed.longest, fixed.mean) == ("dense", 2, 2, 1.5)
    assert facts("vector", [[0.5, 1.5], [1.0]]).role == "unused"


def test_numbers() -> None:
    plain = facts("x", [1.5, 2.5, 3.5, None])
    assert (plain.role, plain.nulls, plain.low, plain.high, plain.log) == ("dense", 1, 1.5, 3.5, False)
    assert (plain.mean, plain.deviation) == (2.5, pytest.approx(math.sqrt(2 / 3), abs=1e-6))
    values = [0.0] * 20 + [1000.0]
    far = facts("x", values)
    logs = np.log1p(values)
    assert far.log
    assert (far.mean, far.deviation) == pytest.approx((logs.mean(), logs.std()), rel=1e-5)
    assert not facts("x", [0.0] * 20 + [99.0]).log  # not above 100
    assert not facts("x", [-1.0] * 20 + [1000.0]).log  # below 0
    assert not facts("x", [0.0, 600.0, 1000.0]).log  # not far above the others
    assert not facts("x", np.random.default_rng(0).normal(500, 100, 5000)).log  # a bell, and some lie far out
    assert facts("x", [2.0, 2.0]).role == "unused"
    large = facts("x", [2**62 + 3**10 * (17 * number % 101) for number in range(101)])  # not exact as float64
    assert large.role == "dense" and large.mean == pytest.approx(2**62)


def test_a_mean_far_from_zero_is_as_exact_as_the_deviation() -> None:
    seconds = facts("seen", [1.7e9 + 0.5 * number for number in range(3000)])
    assert seconds.mean == pytest.approx(1.7e9 + 749.75, abs=1e-2) and seconds.deviation == pytest.approx(433, abs=0.1)


def test_ids_that_pandas_made_floats_are_told() -> None:
    """It does where some are null."""
    ids = facts("user_id", [3.0, 7.0, None])
    assert ids.role == "unused" and "astype('Int64')" in ids.note
    assert facts("user_id", [3.5, 7.0, None]).role == facts("paid", [3.0, 7.0, None]).role == "dense"
    assert facts("bid", [17 * number % 101 for number in range(101)]).role == "dense", "a price"


def test_counts_of_rows_are_no_features() -> None:
    assert facts("n", list(range(100, 111))).note == "counts the rows"
    assert facts("n", list(range(9))).role == "id"  # too few to tell
    assert facts("n_id", [*range(600), *range(600)]).note == "counts the rows"  # of two files
    assert facts("n_id", [*range(20), *range(20)]).role == "id"


def test_few_different_integers_are_ids_and_many_are_numbers() -> None:
    shuffled = [17 * n % 101 for n in range(101)]
    assert facts("x", [n % 63 for n in shuffled]).role == "id"
    assert facts("x", [n % 64 for n in shuffled]).role == "dense"
    assert facts("x_code", [n % 64 for n in shuffled]).role == facts("Movie", shuffled).role == "id"


def test_smallest_and_largest_of_all_rows_by_the_files() -> None:
    spanned = facts("item_id", [3, 5, 5, 4], share=0.5, span=(1, 9))
    assert (spanned.low, spanned.high) == (1, 9)
    unknown = facts("item_id", [3, 5, 5, 4], share=0.5)
    assert unknown.low is None and not unknown.dense_range


def test_the_proposal_in_full() -> None:
    columns = [
        facts("click", [0, 1, 1]),
        facts("user_id", [3, 1, 2]),
        facts("city", ["a", None, "b"]),
        facts("price", [0.5, None, 1.5]),
        facts("at_ts", [1, 2, 3]),
        facts("ts", [1_700_000_000_000, 1_700_000_000_002, 1_700_000_000_009]),
    ]
    assert propose(columns, [{"column": "click"}], dim=8) == {
        "schema": {
            "label": {"column": "click"},
            "timestamp": {"column": "ts", "unit": "ms"},
            "group": {"column": "user_id"},
            "dense": [
                {
                    "name": "price",
                    "default": 0.0,
                    "transforms": [
                        {"kind": "standardize", "mean": 1.0, "std": 0.5},
                        {"kind": "clip", "lowest": -5.0, "highest": 5.0},
                    ],
                }
            ],
            "sparse": [
                {"name": "user_id", "kind": "id", "mapping": {"kind": "identity"}},
                {"name": "city", "kind": "id", "mapping": {"kind": "hash"}, "on_null": "empty"},
                {"name": "at_ts", "kind": "id", "mapping": {"kind": "identity"}},
            ],
        },
        "tables": [
            {"name": "user_id", "rows": 12, "dim": 8, "features": ["user_id"]},
            {"name": "city", "rows": 16, "dim": 8, "features": ["city"]},
            {"name": "at_ts", "rows": 12, "dim": 8, "features": ["at_ts"]},
        ],
    }


def test_columns_of_few_or_odd_values() -> None:
    below = facts("item_id", [-1, 3, 5, 5])
    assert below.low == -1 and not below.dense_range, "a row has no number below 0"
    assert facts("item_id", [0, 3, 5, 5]).dense_range
    assert facts("tags", [[], []], pa.list_(pa.int64())).longest == 0
    nothing = facts("user_id", [None, None], pa.float64())
    assert (nothing.role, nothing.note) == ("unused", "the same value in all inspected rows")
    assert facts("ts", [[1_700_000_000], [1_700_000_001, 1_700_000_009]]).role == "id_list"
    assert facts("weight", [[1, 5], [2]]).role == "id_list"


LATEST_S = 7_258_118_400  # 2200-01-01


def told(name: str, values: Any, kind: pa.DataType | None = None) -> tuple[str, str]:
    """The role, and the begin of its reason."""
    found = facts(name, values, kind)
    return found.role, found.note.partition(":")[0]


def test_times_that_a_schema_can_read() -> None:
    seconds = pa.timestamp("s")
    assert told("x", [0, LATEST_S - 1], seconds) == ("timestamp", "")
    outside = ("unused", "a time with nulls, or outside 1970 to 2200")
    assert told("x", [0, LATEST_S], seconds) == told("x", [-1, 5], seconds) == told("x", [None, 5], seconds) == outside
    assert told("x", [0, 90_000], pa.date32())[0] == "unused" and told("x", [0, 80_000], pa.date32())[0] == "timestamp"
    assert told("ts", [1_700_000_000 + second for second in range(50)])[0] == "timestamp", "an event a second"
    assert told("ts", [1_700_000_000] * 3)[0] == "timestamp" and told("ts", [5, 6, 7])[0] == "id"


def test_columns_that_are_told_by_name() -> None:
    numbers = [0.5, 1.5, 0.0]
    assert told("Weight", numbers)[0] == "sample_weight" and told("weight", [0.5, -0.1, 2])[0] == "dense"
    assert told("weight", [0.5, None, 2.0])[0] == "dense" and told("weight", [0.5, np.inf])[0] == "unused"
    assert told("PScore", numbers)[0] == "unused" and told("session_id", [3, 3, 9])[0] == "group"
    assert told("session_id", [3, None, 9])[0] == "id" and told("y", [0, 1, 1])[0] == "label"
    assert told("y", [0, 1, None])[0] == "id" and told("y", [True, None])[0] == "unused"


@pytest.mark.parametrize(
    ("low", "high", "unit"),
    [
        (1_700_000_000, 1_700_000_001, "s"),
        (1_700_000_000_000, 1_700_000_000_001, "ms"),
        (1.7e15, 1.8e15, "us"),
        (1.7e18, 1.8e18, "ns"),
        (10**8, LATEST_S - 1, "s"),
        (10**8, LATEST_S, None),
        (10**8 - 1, 10**8, None),
        (0, 1_700_000_000, None),
        (1_700_000_000, 1_700_000_000_000, None),
    ],
)
def test_the_unit_of_times_is_told_by_their_size(low: float, high: float, unit: str | None) -> None:
    assert time_unit(low, high) == unit
