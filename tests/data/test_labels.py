"""Labels that are no 0 and 1 in the files: one value against others, or numbers from a threshold on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rayrec.data import DataError, Manifest, Mapping, Schema, check

FEATURE = {"sparse": [{"name": "x"}]}


def labels_of(column: Any, **label: Any) -> list[float]:
    schema = Schema.model_validate({"label": {"column": "y", **label}, **FEATURE})
    rows = pa.table({"y": column, "x": [0] * len(column)})
    return Mapping(schema, {"x": 1}).to_batch(rows).label.tolist()


@pytest.mark.parametrize(
    ("column", "label", "wanted"),
    [
        (["a", "b", "c"], {"positive": "b"}, [0, 1, 0]),
        (pa.array(["a", "b"]).dictionary_encode(), {"positive": "b", "negative": "a"}, [0, 1]),
        (pa.array([b"a", b"\xff"]), {"positive": "a"}, [1, 0]),
        (pa.array(["a", "b"], pa.string_view()), {"positive": "a"}, [1, 0]),
        (pa.array([1, 2, -1], pa.int8()), {"positive": 300}, [0, 0, 0]),
        ([1, 2, -1], {"positive": -1}, [0, 0, 1]),
        ([3.5, 4.0, 5.0, float("inf")], {"at_least": 4}, [0, 1, 1, 1]),
        ([2**53 - 1, 2**53], {"at_least": float(2**53)}, [0, 1]),  # no float32 tells these apart
        (pa.array([1, 2]).cast(pa.decimal128(22, 2)), {"at_least": 1.5}, [0, 1]),
    ],
)
def test_values_become_labels(column: Any, label: dict[str, Any], wanted: list[float]) -> None:
    assert labels_of(column, **label) == wanted


@given(st.lists(st.integers(-3, 3), min_size=1, max_size=20), st.integers(-3, 3))
def test_both_rules_are_the_comparisons_of_numpy(numbers: list[int], value: int) -> None:
    assert labels_of(numbers, positive=value) == (np.array(numbers) == value).tolist()
    assert labels_of(numbers, at_least=value) == (np.array(numbers) >= value).tolist()
    assert labels_of([str(n) for n in numbers], positive=str(value)) == labels_of(numbers, positive=value)


@pytest.mark.parametrize(
    ("column", "label", "row", "problem"),
    [
        (["a", "b", "c"], {"positive": "b", "negative": "a"}, 2, "the label must be 'b' or 'a'"),
        ([7, 8, 9], {"positive": 8, "negative": 7}, 2, "the label must be 8 or 7"),
        (["a", None], {"positive": "a", "negative": "b"}, 1, "the label is null"),
        ([1.0, None], {"at_least": 0.5}, 1, "the label is null"),
        ([1.0, float("nan")], {"at_least": 0.5}, 1, "the label must be a number"),
        ([0, 1, 2], {}, 2, "the label must be 0 or 1"),
    ],
)
def test_a_value_that_is_neither_is_refused_with_its_row(
    column: Any, label: dict[str, Any], row: int, problem: str
) -> None:
    with pytest.raises(DataError) as caught:
        labels_of(column, **label)
    assert (caught.value.problem, caught.value.row, caught.value.column) == (problem, row, "y")
    assert caught.value.fix is not None


def test_the_fix_of_another_label_names_both_rules() -> None:
    with pytest.raises(DataError, match=r"at_least: NUMBER} or positive: VALUE; or .*`kind: number`"):
        labels_of([0, 5])
    with pytest.raises(DataError, match=r"label: {column: y, positive: VALUE}$"):
        labels_of(["no", "yes"])


@pytest.mark.parametrize(
    ("column", "label", "wanted"),
    [
        (["1", "2"], {"positive": 1}, "an integer, as positive=1 is"),
        ([1, 2], {"positive": "1"}, "a string, as positive='1' is"),
        ([1.0, 2.0], {"positive": 1}, "an integer, as positive=1 is"),
        (["1", "2"], {"at_least": 1}, "a number, to be at least 1"),
    ],
)
def test_a_column_of_another_type_is_refused(column: Any, label: dict[str, Any], wanted: str) -> None:
    with pytest.raises(DataError, match="the label must be") as caught:
        labels_of(column, **label)
    assert wanted in caught.value.problem


@pytest.mark.parametrize(
    ("label", "problem"),
    [
        ({"positive": "a", "at_least": 1.0}, "not both"),
        ({"kind": "number", "positive": "a"}, "need a binary label"),
        ({"negative": "a"}, "needs `positive`"),
        ({"positive": "1", "negative": 0}, "needs `positive`"),
        ({"positive": 1, "negative": 1}, "needs `positive`"),
        ({"at_least": float("inf")}, "finite"),
        ({"positive": True}, "positive"),
    ],
)
def test_rules_that_contradict_each_other_are_refused(label: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Schema.model_validate({"label": label, **FEATURE})


def test_each_of_several_labels_has_its_own_rule(tmp_path: Path) -> None:
    labels = [
        {"name": "rich", "column": "income", "positive": ">50", "on_null": "ignore"},
        {"name": "old", "column": "age", "at_least": 60},
    ]
    schema = Schema.model_validate({"labels": labels, **FEATURE})
    rows = pa.table({"income": [">50", "<50", None], "age": [59, 60, 61], "x": [0, 0, 0]})
    found = Mapping(schema, {"x": 1}).to_batch(rows).label.numpy()
    np.testing.assert_array_equal(found, [[1, 0], [0, 1], [np.nan, 1]])
    pq.write_table(rows, tmp_path / "x.parquet")
    report = check(Manifest.read(str(tmp_path), schema), schema, {"x": 1})
    assert (report.rows, report.bad_rows, report.positives) == (3, 0, 1)
