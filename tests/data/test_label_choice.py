"""What is predicted: as `--label` says it, or as the columns look; and what is said where it cannot be."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from rayrec.data import DataError
from rayrec.data.tools.init.label_choice import choose_label

TABLE = pa.table(
    {
        "flag": [0, 1, 0, 0],
        "hit": [1.0, 0.0, 0.0, 0.0],
        "bought": [True, False, False, False],
        "income": ["- 50000.", "- 50000.", "50000+.", "- 50000."],
        "sex": pa.array(["f", "m", "m", "f"]).dictionary_encode(),
        "year": [94, 95, 95, 95],
        "stars": [1.0, 3.5, 4.0, 5.0],
        "colour": ["red", "red", "green", "blue"],
        "one": ["x"] * 4,
        "null": ["a", "b", None, "a"],
        "nan": [0.0, 1.0, float("nan"), 1.0],
        "list": [[1], [2], [3], [4]],
        "a>=b": [0, 0, 1, 1],
    }
)


@pytest.mark.parametrize(
    ("wanted", "schema", "positives"),
    [
        ("flag", {"column": "flag"}, [0, 1, 0, 0]),
        ("hit", {"column": "hit"}, [1, 0, 0, 0]),
        ("bought", {"column": "bought"}, [1, 0, 0, 0]),
        ("income", {"column": "income", "positive": "50000+.", "negative": "- 50000."}, [0, 0, 1, 0]),
        ("income= 50000+.", {"column": "income", "positive": "50000+.", "negative": "- 50000."}, [0, 0, 1, 0]),
        ("income=- 50000.", {"column": "income", "positive": "- 50000.", "negative": "50000+."}, [1, 1, 0, 1]),
        ("sex", {"column": "sex", "positive": "m", "negative": "f"}, [0, 1, 1, 0]),  # equally many: by value
        ("year", {"column": "year", "positive": 94, "negative": 95}, [1, 0, 0, 0]),
        ("year=95", {"column": "year", "positive": 95, "negative": 94}, [0, 1, 1, 1]),
        ("stars>=4", {"column": "stars", "at_least": 4.0}, [0, 0, 1, 1]),
        ("year >= 95", {"column": "year", "at_least": 95.0}, [0, 1, 1, 1]),
        ("colour=red", {"column": "colour", "positive": "red"}, [1, 1, 0, 0]),
        ("a>=b", {"column": "a>=b"}, [0, 0, 1, 1]),
    ],
)
def test_labels_that_are_given(wanted: str, schema: dict[str, Any], positives: list[int]) -> None:
    found = choose_label(TABLE, [], wanted)
    assert found is not None and found.schema == schema and found.positives.tolist() == [bool(p) for p in positives]


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("Flag", "there is no column 'Flag'; did you mean 'flag'"),
        ("colour", r"3 values, not two: 'red', 'blue', 'green' .*--label 'colour=red'$"),
        ("stars", r"4 values, not two: 1.0, 3.5, 4.0, 5.0 .*--label 'stars>=4'$"),
        ("income=rich", "no row has the value 'rich'; the column has '- 50000.', '50000\\+.'"),
        ("stars=4", r"compares texts or integers; the column has type double .*--label 'stars>=NUMBER'"),
        ("stars>=9", "no row is at least 9; the column ranges from 1 to 5"),
        ("stars>=0", "every row is at least 0"),
        ("stars>=x", "'x' is not a number"),
        ("stars>=1_0", "'1_0' is not a number"),
        ("stars>=٣", "'٣' is not a number"),
        ("stars>=nan", "'nan' is not a number"),
        ("colour>=4", "compares numbers; the column has type large_string"),
        ("one", "'x' in all inspected rows"),
        ("one=x", "'x' in all inspected rows"),
        ("null", "missing in 1 of 4 inspected rows"),
        ("nan", "missing in 1 of 4 inspected rows"),
        ("list", "one value per row"),
        ("", "there is no column ''"),
    ],
)
def test_labels_that_cannot_be_learnt_from(wanted: str, problem: str) -> None:
    with pytest.raises(DataError, match=problem) as caught:
        choose_label(TABLE, [], wanted)
    assert caught.value.fix


def test_without_a_word_the_best_named_is_taken_and_another_one_is_told() -> None:
    named = choose_label(TABLE.rename_columns({"bought": "Click"}), ["flag", "Click"], None)
    assert named is not None and (named.column, named.why) == ("Click", "by its name")
    last = choose_label(TABLE, ["flag", "bought"], None)
    assert last is not None and last.column == "bought" and last.positives.tolist() == [True, False, False, False]
    assert last.why == "the last of 2 columns with only 0 and 1; no --label was given"
    only = choose_label(TABLE, ["flag"], None)
    assert only is not None and only.why.startswith("the only column with only 0 and 1")
    assert choose_label(TABLE, [], None) is None
