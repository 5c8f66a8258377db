"""Features of single columns by hand: what every kind of null, length and weight becomes, and what is said of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from rayrec.data import DataError, DenseFeature, Mapping, Schema, SparseFeature
from tests.data.mapped import kept, mapped
from tests.data.reference import hashed_row, hashed_text, seed_of

Bad = dict[int, tuple[str | None, str]]  # by row: the value, and the column


def told(errors: dict[int, DataError]) -> Bad:
    return {row: (error.value, str(error.column)) for row, error in errors.items()}


def bags(rows: int, columns: dict[str, pa.Array], **feature: Any) -> tuple[list[list[int]], list[float] | None, Bad]:
    """Each row's ids, all weights, and what is wrong."""
    found_rows, errors = mapped(pa.table(columns), Schema(sparse=[SparseFeature(name="x", **feature)]), {"x": rows})
    (ids,) = found_rows.ids
    offsets = np.arange(len(columns["x"]) + 1) if ids.offsets is None else ids.offsets
    found = [ids.values[a:b].tolist() for a, b in zip(offsets, offsets[1:], strict=False)]
    return found, None if ids.weights is None else ids.weights.tolist(), told(errors)


def test_single_ids() -> None:
    column = {"x": pa.array([3, None, 0, 4])}
    assert bags(5, column) == ([[3], [0], [0], [4]], None, {1: ("null", "x")})
    assert bags(5, column, on_null="empty") == ([[3], [], [0], [4]], None, {})
    assert bags(5, column, default=2) == ([[3], [2], [0], [4]], None, {})
    assert bags(4, column, on_null="empty") == ([[3], [], [0], [0]], None, {3: ("4", "x")})
    wide = {"x": pa.array([-7, 3, 9, 4])}
    assert bags(4, wide) == ([[0], [3], [0], [0]], None, {0: ("-7", "x"), 2: ("9", "x"), 3: ("4", "x")})
    assert bags(4, wide, mapping={"kind": "identity", "bounds": "clip"})[0] == [[0], [3], [3], [3]]
    assert bags(4, wide, mapping={"kind": "identity", "bounds": "drop"})[0] == [[], [3], [], []]
    large = {"x": pa.array([(1 << 64) - 1, 3], pa.uint64())}
    assert bags(4, large, mapping={"kind": "identity", "bounds": "clip"})[0] == [[3], [3]]
    assert bags(5, {"x": pa.array([3, 1, 3]).dictionary_encode()})[0] == [[3], [1], [3]]
    assert bags(5, {"x": column["x"]}, on_null="empty", mapping={"kind": "identity", "bounds": "drop"})[0][1] == []


def test_hashed_ids() -> None:
    hashed = {"kind": "hash", "seed": 4}
    numbers = [hashed_row(value, seed_of(4), 100) for value in (7, -1, 7)]
    assert bags(100, {"x": pa.array([7, -1, 7])}, mapping=hashed)[0] == [[row] for row in numbers]
    a, b = (hashed_text(text, seed_of(4), 100, law=1) for text in (b"a", b"b"))
    texts = pa.array(["a", None, "b", "a"])
    coded = pa.DictionaryArray.from_arrays(pa.array([1, None, 2, 1, 0]), pa.array([None, "a", "b"]))
    for values in (texts, texts.dictionary_encode(), texts.cast(pa.large_string()), texts.cast(pa.binary())):
        assert bags(100, {"x": values}, mapping=hashed, on_null="empty") == ([[a], [], [b], [a]], None, {})
        assert bags(100, {"x": values}, mapping=hashed, default="b")[0] == [[a], [b], [b], [a]]
    assert bags(100, {"x": coded}, mapping=hashed, on_null="empty")[0] == [[a], [], [b], [a], []]
    assert list(bags(100, {"x": coded}, mapping=hashed)[2]) == [1, 4]
    assert bags(100, {"x": pa.array([None, None], pa.string())}, mapping=hashed, on_null="empty")[0] == [[], []]


def test_lists_of_ids() -> None:
    lists = {"x": pa.array([[1, 2, 3], None, [], [4, None]])}
    how = {"kind": "id_list"}
    assert bags(9, lists, **how) == ([[1, 2, 3], [], [], [4, 0]], None, {1: ("null", "x"), 3: ("null", "x")})
    assert bags(9, lists, **how, on_null="empty") == ([[1, 2, 3], [], [], [4]], None, {})
    assert bags(9, lists, **how, default=7) == ([[1, 2, 3], [7], [], [4, 7]], None, {})
    for length, first, last in (
        (1, [[1], [], [], [4]], [[3], [], [], []]),
        (2, [[1, 2], [], [], [4]], [[2, 3], [], [], [4]]),
    ):
        assert bags(9, lists, **how, on_null="empty", max_length=length, keep="first")[0] == first
        assert bags(9, lists, **how, on_null="empty", max_length=length)[0] == last
    assert bags(9, lists, **how, on_null="empty", max_length=3)[0] == [[1, 2, 3], [], [], [4]]
    assert bags(3, lists, **how, on_null="empty")[2] == {0: ("3", "x"), 3: ("4", "x")}
    sliced = {"x": lists["x"].slice(2)}
    assert bags(9, sliced, **how, on_null="empty")[0] == [[], [4]]


def test_pairs_of_ids_and_weights() -> None:
    pairs = [[{"id": 1, "weight": 0.5}, None, {"id": None, "weight": 4.0}], None, [{"id": 2, "weight": None}]]
    kind = pa.list_(pa.struct({"id": pa.int64(), "weight": pa.float64()}))
    column = {"x": pa.array(pairs, kind)}
    how = {"kind": "weighted_id_list"}
    found, weights, bad = bags(9, column, **how, default=7)
    assert (found, weights) == ([[1, 7, 7], [7], [2]], [0.5, 1.0, 4.0, 1.0, 0.0]) and bad == {2: ("None", "x")}
    assert bags(9, column, **how, on_null="empty")[:2] == ([[1], [], [2]], [0.5, 0.0])
    assert bags(9, column, **how, default=7, max_length=2)[:2] == ([[7, 7], [7], [2]], [1.0, 4.0, 1.0, 0.0])


def test_weights_beside_ids() -> None:
    how = {"kind": "weighted_id_list", "weight_column": "w"}
    ids = pa.array([[1, 2], [3], [4, 5]])
    good = {"x": ids, "w": pa.array([[0.5, 1.5], [2.0], [-1.0, 0.0]])}
    assert bags(9, good, **how) == ([[1, 2], [3], [4, 5]], [0.5, 1.5, 2.0, -1.0, 0.0], {})
    flags = pa.array([[True, False], [True], [True, True]])
    assert bags(9, {"x": ids, "w": flags}, **how)[1] == [1, 0, 1, 1, 1]
    wrong = {"x": ids, "w": pa.array([[0.5, float("nan")], [2.0, 3.0], [1e39, 5.0]])}
    found, weights, bad = bags(9, wrong, **how)
    assert found == [[1, 2], [3], [4, 5]] and weights == [0.5, 0.0, 1.0, 0.0, 5.0]
    assert bad == {0: ("nan", "w"), 1: ("2 weights, 1 ids", "w"), 2: ("1e+39", "w")}


def numbers(*features: DenseFeature, **columns: pa.Array) -> tuple[list[list[float]], Bad]:
    rows, errors = mapped(pa.table(columns), Schema(dense=[*features]), {})
    return rows.dense.tolist(), told(errors)


def dense(**feature: Any) -> DenseFeature:
    return DenseFeature.model_validate({"name": "x", **feature})


def test_numbers_of_every_type() -> None:
    for values in (
        pa.array([1, 2]),
        pa.array([1.0, 2.0]),
        pa.array([1, 2]).dictionary_encode(),
        pa.array([1, 2]).cast(pa.decimal128(21, 2)),
    ):
        assert numbers(dense(), x=values) == ([[1.0], [2.0]], {})
    assert numbers(dense(), x=pa.array([True, False]))[0] == [[1.0], [0.0]]
    assert numbers(dense(), x=pa.array([3, None])) == ([[3.0], [0.0]], {1: (None, "x")})
    assert numbers(dense(default=5.0), x=pa.array([3, None])) == ([[3.0], [5.0]], {})
    assert numbers(dense(default=0.0), x=pa.array([3, None]))[1] == {}
    seconds = {"kind": "standardize", "mean": 1.7e9, "std": 2.0}
    assert numbers(dense(transforms=[seconds]), x=pa.array([1_700_000_001, 1_699_999_999]))[0] == [[0.5], [-0.5]]


def test_lists_of_numbers() -> None:
    pairs = pa.array([[1.0, 2.0], None, [3.0], [4.0, None], [5.0, 6.0, 7.0], [8.0, 9.0]])
    found, bad = numbers(dense(width=2), x=pairs)
    assert found[0] == [1, 2] and found[5] == [8, 9] and list(bad) == [1, 2, 3, 4]
    assert bad[2] == ("a list of 1", "x") and bad[4] == ("a list of 3", "x") and bad[3] == (None, "x")
    found, bad = numbers(dense(width=2, default=-1.0), x=pairs)
    assert found == [[1, 2], [-1, -1], [0, 0], [4, -1], [0, 0], [8, 9]] and list(bad) == [2, 4]
    whole = pa.array([[1.0, 2.0], [3.0]])
    assert list(numbers(dense(width=2, default=-1.0), x=whole)[1]) == [1]
    both, _ = numbers(dense(width=2), dense(name="y"), x=pa.array([[1, 2], [3, 4]]), y=pa.array([5, 6]))
    assert both == [[1, 2, 5], [3, 4, 6]]


def test_a_number_does_not_depend_on_the_rows_beside_it() -> None:
    steps: list[list[dict[str, Any]]] = [
        [{"kind": "standardize", "mean": 1234567.89, "std": 0.5}],
        [{"kind": "min_max", "lowest": 1234567.89, "highest": 1234577.9}],
        [{"kind": "log1p"}, {"kind": "standardize", "mean": 14.02623, "std": 1e-6}],
        [],
    ]
    for transforms in steps:
        feature = dense(transforms=transforms, default=0.0)
        alone, beside_null, wide = (
            numbers(feature, x=values)[0][0]
            for values in (
                pa.array([1234568.0], pa.float32()),
                pa.array([1234568.0, None], pa.float32()),
                pa.array([1234568.0]),
            )
        )
        assert alone == beside_null == wide


def test_transforms_in_their_order() -> None:
    steps: list[dict[str, Any]] = [{"kind": "clip", "lowest": 0.0, "highest": 9.0}, {"kind": "log1p"}]
    values = pa.array([-5.0, 3.0, 99.0])
    assert numbers(dense(transforms=steps), x=values)[0] == [
        [0],
        [pytest.approx(np.log(4))],
        [pytest.approx(np.log(10))],
    ]
    found, bad = numbers(dense(transforms=steps[::-1]), x=pa.array([-1.0, -0.5, -2.0, 3.0]))
    assert list(bad) == [0, 2] and found[3] == [pytest.approx(np.log(4))], "a clip does not hide what has no logarithm"
    assert bad[0] == ("-1.0, nan after log1p and clip", "x")
    far, bad = numbers(dense(), dense(name="y"), x=pa.array([1.0, 1e39]), y=pa.array([float("inf"), 1.0]))
    assert bad == {0: ("inf", "y"), 1: ("1e+39, inf after the cast to float32", "x")}
    assert far[0][0] == far[1][1] == 1.0


def test_blocks_of_rows_are_put_side_by_side() -> None:
    rows = 8192 + 3
    found, _ = numbers(dense(), dense(name="y"), x=pa.array(np.arange(rows)), y=pa.array(-np.arange(rows)))
    assert found[8191:] == [[n, -n] for n in range(8191, rows)]


def test_newer_layouts_are_read_as_older_ones() -> None:
    hashed: dict[str, Any] = {"mapping": {"kind": "hash"}, "on_null": "empty"}
    texts, lists = pa.array(["a", None, "b"]), pa.array([["a", "b"], None, []])
    for kind in (pa.string_view(), pa.large_string(), pa.binary_view(), pa.large_binary()):
        assert bags(50, {"x": texts.cast(kind)}, **hashed) == bags(50, {"x": texts}, **hashed)
    for kind in (pa.large_list(pa.string()), pa.list_(pa.string_view()), pa.large_list(pa.string_view())):
        values = pa.array(lists.to_pylist(), kind)
        assert bags(50, {"x": values}, kind="id_list", **hashed) == bags(50, {"x": lists}, kind="id_list", **hashed)
    overlapping = pa.ListViewArray.from_arrays(
        [2, 0, 1], [2, 3, 0], pa.array([1, 2, 3, 4]), mask=pa.array([False, False, True])
    )
    assert bags(9, {"x": overlapping}, kind="id_list", on_null="empty")[0] == [[3, 4], [1, 2, 3], []]


def test_numbers_of_more_digits_than_a_float_has_are_rounded() -> None:
    large, rounded = (1 << 60) + 1, float(1 << 60)
    assert numbers(dense(default=1.0), x=pa.array([large, None])) == ([[rounded], [1.0]], {})
    found, bad = numbers(dense(width=2), x=pa.array([[large, 3], [1]]))
    assert found[0] == [rounded, 3.0] and list(bad) == [1]
    how = {"kind": "weighted_id_list", "weight_column": "w"}
    assert bags(9, {"x": pa.array([[1]]), "w": pa.array([[large]])}, **how)[1] == [rounded]
    fields = {"label": {"column": "y", "kind": "number"}, "sample_weight": {}, "dense": [{"name": "x"}]}
    columns = {"x": [1], "y": pa.array([large]), "weight": pa.array([large])}
    targets = mapped(pa.table(columns), Schema.model_validate(fields), {}, labelled=True)[0].targets
    assert targets.weight is not None and (targets.label.tolist(), targets.weight.tolist()) == ([rounded], [rounded])
    fields = {"label": {"column": "y"}, "group": {}, "timestamp": {}, "dense": [{"name": "x"}]}
    most = pa.array([(1 << 64) - 1, 5], pa.uint64())
    columns = {"x": [1, 1], "y": pa.array([0, 1]), "group": most, "timestamp": most}
    rows, errors = mapped(pa.table(columns), Schema.model_validate(fields), {}, labelled=True)
    assert rows.targets.group.tolist() == [-1, 5] and list(errors) == [0]


def test_bags_keep_their_weights_in_another_order() -> None:
    columns = {"x": pa.array([[7, 8], [], [9, 4]]), "w": pa.array([[0.5, 1.5], [], [2.5, 3.5]])}
    feature = SparseFeature(name="x", kind="weighted_id_list", weight_column="w")
    rows, _ = mapped(pa.table(columns), Schema(sparse=[feature]), {"x": 10}, np.array([2, 1, 0]))
    (taken,) = rows.ids
    assert (taken.values.tolist(), taken.offsets.tolist()) == ([9, 4, 7, 8], [0, 2, 2, 4])
    assert taken.weights.tolist() == [2.5, 3.5, 0.5, 1.5]


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [
        (pa.int32(), "integer"),
        (pa.dictionary(pa.int8(), pa.uint16()), "integer"),
        (pa.large_string(), "text"),
        (pa.dictionary(pa.int32(), pa.binary()), "text"),
        (pa.list_(pa.string_view()), "text"),
        (pa.large_list(pa.int64()), "integer"),
        (pa.list_(pa.struct([("id", pa.string()), ("weight", pa.float32())])), "text"),
        (pa.list_(pa.struct([("weight", pa.float32()), ("id", pa.int64())])), "integer"),
    ],
)
def test_the_type_of_ids_is_that_of_the_innermost_values(kind: pa.DataType, wanted: str) -> None:
    schema = Schema.model_validate({"sparse": [{"name": "a"}, {"name": "b", "id_type": "text", "column": "a"}]})
    assert [feature.id_type for feature in kept(schema, {"a": kind}).sparse] == [wanted, "text"]


@pytest.mark.parametrize("id_type", ["text", "integer", None])
def test_nothing_but_nulls_becomes_ids_of_the_type_that_is_known(id_type: str | None) -> None:
    feature = {"name": "a", "id_type": id_type, "mapping": {"kind": "hash"}, "on_null": "empty"}
    schema = Schema.model_validate({"sparse": [feature]})
    batch = Mapping(schema, {"a": 9}, labels=False).to_batch({"a": [None, None]})
    assert batch.rows == 2 and batch.sparse.values().tolist() == []


@pytest.mark.parametrize("values", [[1.5, 2.0], [2, 1.5], pd.Series([1.5, None])], ids=["floats", "mixed", "pandas"])
def test_a_fraction_is_no_integer_of_a_derived_column(values: Any) -> None:
    """pyarrow makes 1 of 1.5 where it is given the type."""
    derived = [{"name": "b", "kind": "buckets", "column": "n", "boundaries": [1.2, 9.0]}]
    raw = {"derived": derived, "sparse": [{"name": "b"}], "column_types": {"n": "integer"}}
    schema = Schema.model_validate(raw)
    with pytest.raises(DataError, match=r"cannot convert the values to integer: .*1\.5.* truncated") as caught:
        Mapping(schema, {"b": 3}, labels=False).to_batch({"n": values})
    assert caught.value.column == "n"
    nulls = {"sparse": [{"name": "b", "on_null": "empty"}]}
    whole = Mapping(Schema.model_validate(raw | nulls), {"b": 3}, labels=False)
    for numbers in ([1.0, None], [1, None], pd.Series([1.0, None])):
        assert whole.to_batch({"n": numbers}).sparse.lengths().tolist() == [1, 0]
    lists = {"column_types": {"n": "list<integer>"}, "sparse": [{"name": "b", "kind": "id_list"}]}
    with pytest.raises(DataError, match="truncated"):
        Mapping(Schema.model_validate(raw | lists), {"b": 3}, labels=False).to_batch({"n": [[1.0], [1.5]]})
