"""Derived columns: their values by hand and by a slow reference, alike however rows arrive, with their errors."""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rayrec.cli import run
from rayrec.data import DataError, DataSet, Hash, Manifest, Mapping, Schema, SparseFeature, inspect
from rayrec.data.mapping.derived.derive import derive
from rayrec.data.mapping.fingerprint import mapping_fingerprint
from rayrec.data.mapping.problems import Problems
from rayrec.data.tools.fit import fit, for_reading, statistics, unfitted_names, without_statistics
from tests.data.mapped import kept, mapped

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
UNITS = {"s": 1, "ms": 1000, "us": 10**6, "ns": 10**9}


def schema(derived: list[dict[str, Any]], **more: Any) -> Schema:
    sparse = [{"name": "id", "column": derived[-1]["name"], "mapping": {"kind": "hash"}}]
    return Schema.model_validate({"sparse": sparse, "derived": derived, **more})


def made(kind: str, arrays: dict[str, pa.Array], **spec: Any) -> pa.Array:
    problems = Problems()
    out = derive(schema([{"name": "out", "kind": kind, **spec}]).derived, arrays, problems)["out"]
    assert not problems
    return out


def test_numbers_become_ids_of_buckets() -> None:
    x = pa.array([-1.0, 1.0, 3.9, None, 1e9])
    assert made("buckets", {"x": x}, column="x", boundaries=[1.0, 2.0]).to_pylist() == [0, 1, 2, None, 2]
    assert made("buckets", {"x": x}, column="x", log_base=2.0, buckets=4).to_pylist() == [0, 1, 2, None, 3]
    lists = pa.array([[0, 5], None, [], [None, 1]])
    assert made("buckets", {"x": lists}, column="x", boundaries=[1.0]).to_pylist() == [[0, 1], None, [], [None, 1]]
    problems = Problems()
    spec = {"name": "out", "kind": "buckets", "column": "x", "boundaries": [1.0]}
    derive(schema([spec]).derived, {"x": pa.array([[1.0], [], [2.0, math.nan]])}, problems)
    error = problems.error(2)
    assert problems.rows().tolist() == [2] and error.column == "x" and error.value == "nan" and "'out'" in error.problem


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (pa.float16(), "float16"),
        (pa.float32(), "float32"),
        (pa.float64(), "number"),
        (pa.decimal128(38, 2), "decimal"),
        (pa.decimal256(40, 2), "decimal"),
    ],
)
def test_a_number_of_a_request_falls_into_the_bucket_of_training(kind: pa.DataType, name: str) -> None:
    prices = [0.07, 0.99, 1.99, 4.99, 9.99, 19.99, 24.95, 49.9, 99.95]
    exact = [Decimal(str(price)) for price in prices]
    trained = pa.array(exact, kind) if pa.types.is_decimal(kind) else pa.array(prices).cast(kind, safe=False)
    edges = [float(price) for price in trained.to_pylist()[1:]]
    derived = [
        {"name": "bucket", "kind": "buckets", "column": "price", "boundaries": edges},
        {"name": "dear", "kind": "expression", "expression": f"where(price >= {edges[3]!r}, 1, 0)"},
        {"name": "each", "kind": "buckets", "column": "prices", "boundaries": edges},
        {"name": "rate", "kind": "lookup", "column": "rates", "value": "a"},
        {"name": "rated", "kind": "buckets", "column": "rate", "boundaries": edges},
    ]
    sparse = [{"name": "bucket"}, {"name": "each", "kind": "id_list"}, {"name": "rated"}]
    types = {"price": kind, "prices": pa.list_(kind), "rates": pa.map_(pa.string(), kind)}
    schema = Schema.model_validate({"derived": derived, "sparse": sparse, "dense": [{"name": "dear"}]})
    schema = kept(schema, types)
    assert schema.column_types == {"price": name, "prices": f"list<{name}>", "rates": f"map<text, {name}>"}
    mapping = Mapping(schema, dict.fromkeys(("bucket", "each", "rated"), 20), labels=False)
    values = trained.to_pylist()
    lists = pa.array([[value] for value in values], types["prices"])
    maps = pa.array([[("a", value)] for value in values], types["rates"])
    wanted = mapping.to_batch(pa.table({"price": trained, "prices": lists, "rates": maps}))
    assert wanted.sparse.values().tolist() == [*range(len(prices))] * 3
    rows = [{"price": price, "prices": [price], "rates": {"a": price}} for price in prices]
    same(wanted, mapping.to_batch(json.loads(json.dumps(rows))))
    same(wanted, mapping.to_batch({name: [row[name] for row in rows] for name in types}))
    doubles = pa.array([[("a", price)] for price in prices], pa.map_(pa.string(), pa.float64()))
    same(
        wanted, mapping.to_batch(pa.table({"price": prices, "prices": [[price] for price in prices], "rates": doubles}))
    )


@pytest.mark.parametrize("kind", [pa.float32(), pa.decimal128(10, 2)])
def test_a_run_that_did_not_store_the_width_takes_numbers_as_before(kind: pa.DataType) -> None:
    spec = {"name": "out", "kind": "buckets", "column": "price", "boundaries": [0.995]}
    earlier = Schema.model_validate(
        {"derived": [spec], "sparse": [{"name": "out"}], "column_types": {"price": "number"}}
    )
    assert kept(earlier, {"price": kind}).column_types == {"price": "number"}
    prices = pa.array([Decimal("0.99"), Decimal("1.00"), None], pa.decimal128(10, 2)).cast(kind, safe=False)
    mapping = Mapping(earlier.model_copy(update={"sparse": [SparseFeature(name="out", on_null="empty")]}), {"out": 2})
    batch = dataclasses.replace(mapping, labels=False).to_batch(pa.table({"price": prices}))
    assert batch.sparse.values().tolist() == [0, 1]


@pytest.mark.parametrize(
    "kind",
    [pa.decimal128(38, 2), pa.decimal128(18, 9), pa.decimal256(40, 2), pa.decimal128(38, 30), pa.decimal128(9, -2)],
)
def test_a_decimal_is_the_number_that_python_reads(kind: pa.DataType) -> None:
    whole = np.random.default_rng(0).integers(-(10**9) + 1, 10**9, 500).tolist()
    whole += [10**17 + 1, 2**53 + 1, -(2**53) - 1, 7] if kind.precision > 17 else []
    values = [None, *(Decimal(value).scaleb(-kind.scale) for value in whole), None]
    for part in (slice(1, -1), slice(1, 400), slice(0, 502)):  # the first and the second without the large ones
        wanted = [math.nan if value is None else float(value) for value in values[part]]
        numbers = made("expression", {"x": pa.array(values, kind)[part]}, expression="x * 1.0").to_pylist()
        assert np.array_equal([math.nan if one is None else one for one in numbers], wanted, equal_nan=True)


def test_missing_values_are_a_flag() -> None:
    assert made("missing", {"x": pa.array([1.0, None, math.nan])}, column="x").to_pylist() == [0, 1, 1]
    assert made("missing", {"x": pa.array(["a", None])}, column="x").to_pylist() == [0, 1]


def test_crosses_keep_the_order_of_columns_and_take_lists() -> None:
    columns = {"a": pa.array([1, 2, None, 1]), "b": pa.array(["x", "y", "x", "x"]), "c": pa.array([2, 1, 3, 1])}
    ab = made("cross", columns, columns=["a", "b"])
    assert ab[0] == ab[3] != ab[1] and not ab[2].is_valid
    other = {**columns, "b": columns["b"].dictionary_encode()}
    assert ab.equals(made("cross", other, columns=["a", "b"]))
    ac, ca = (made("cross", columns, columns=order) for order in (["a", "c"], ["c", "a"]))
    assert ac[0] != ca[0] and ac[3] == made("cross", {**columns, "c": columns["a"]}, columns=["a", "c"])[0]
    one = {"l": pa.array([[1, 2], None, [], [1, None]]), "s": pa.array([5, 5, 5, None])}
    crossed = made("cross", one, columns=["l", "s"]).to_pylist()
    pair = made("cross", {"l": pa.array([1, 2]), "s": pa.array([5, 5])}, columns=["l", "s"]).to_pylist()
    assert crossed == [pair, None, [], None]
    two = {"l": pa.array([[1, 2], [1]]), "m": pa.array([[5, 6], []], pa.list_(pa.int64()))}
    grid = {"l": pa.array([1, 1, 2, 2]), "m": pa.array([5, 6, 5, 6])}
    wanted = made("cross", grid, columns=["l", "m"]).to_pylist()
    assert made("cross", two, columns=["l", "m"]).to_pylist() == [wanted, []]


CROSSED_IDS = st.one_of(st.none(), st.integers(0, 3))
CROSSED_LISTS = st.one_of(st.none(), st.lists(CROSSED_IDS, max_size=3))


@settings(max_examples=60, phases=[Phase.generate], deadline=None)
@given(st.lists(st.tuples(CROSSED_LISTS, CROSSED_IDS | st.just(1), CROSSED_LISTS), min_size=1, max_size=6))
def test_a_cross_has_every_pair_of_a_row(rows: list[tuple[Any, Any, Any]]) -> None:
    """Rows with null lists, null ids and null elements beside rows without."""
    kinds = {"l": pa.list_(pa.int64()), "s": pa.int64(), "m": pa.list_(pa.int64())}
    arrays = {name: pa.array([row[n] for row in rows], kind) for n, (name, kind) in enumerate(kinds.items())}
    for names in (["l", "s"], ["s", "l"], ["l", "m"]):
        wanted = []
        for row in rows:
            left, right = (row["lsm".index(name)] for name in names)
            if left is None or right is None:
                wanted.append(None)
                continue
            lefts, rights = (value if isinstance(value, list) else [value] for value in (left, right))
            pairs = [(one, other) for one in lefts for other in rights]
            ids = {name: pa.array([pair[n] for pair in pairs], pa.int64()) for n, name in enumerate(names)}
            wanted.append(made("cross", ids, columns=names).to_pylist())
        assert made("cross", arrays, columns=names).to_pylist() == wanted


def test_a_row_with_too_many_pairs_of_a_cross_is_bad_before_they_are_made() -> None:
    derived = [{"name": "out", "kind": "cross", "columns": ["l", "m"]}]
    sparse = [SparseFeature(name="out", kind="id_list", mapping=Hash(kind="hash"))]
    crossed = schema(derived).model_copy(update={"sparse": sparse})
    long = list(range(8000))
    rows = [{"l": [1, 2], "m": [3]}, {"l": long, "m": long}, {"l": [1], "m": [3]}]  # 64M pairs are gigabytes
    batch, errors = Mapping(crossed, {"out": 100}, labels=False).to_batch_and_errors(rows)
    assert batch.sparse.lengths().tolist() == [2, 0, 1]
    assert [*errors] == [1] and "pairs" in errors[1].problem and errors[1].value == "64,000,000 pairs"
    few = Mapping(crossed, {"out": 100}, labels=False, max_pairs=5)
    batch, errors = few.to_batch_and_errors([{"l": [1, 2], "m": [3, 4]}] * 3)
    assert batch.sparse.lengths().tolist() == [4, 0, 0] and [*errors] == [1, 2]
    assert few.to_batch({"l": [[1, 2], [1]], "m": [[3, 4], [5]]}).sparse.lengths().tolist() == [4, 1]


def test_parts_of_times_are_those_of_the_zone() -> None:
    times = [EPOCH + timedelta(hours=7919 * n, minutes=11 * n) for n in range(60)]
    arrays = {
        "s": pa.array([int(t.timestamp()) for t in times]),
        "ns": pa.array(times, pa.timestamp("ns", "Asia/Tokyo")),
        "us": pa.array([t.replace(tzinfo=None) for t in times], pa.timestamp("us")),
    }
    parts = {"hour": lambda t: t.hour, "minute": lambda t: t.minute, "weekday": lambda t: t.weekday()}
    parts |= {"day": lambda t: t.day, "month": lambda t: t.month}
    for zone in ("UTC", "America/New_York", "Asia/Kathmandu"):
        for part, of in parts.items():
            wanted = [of(t.astimezone(ZoneInfo(zone))) for t in times]
            for name in arrays:
                assert made("time_part", arrays, column=name, part=part, zone=zone).to_pylist() == wanted
    with pytest.raises(ValueError, match="unknown time zone 'Mars'"):
        schema([{"name": "h", "kind": "time_part", "column": "t", "zone": "Mars"}])


def test_ages_of_events_and_of_lists_of_them() -> None:
    columns = {"at": pa.array([7200, 3600]), "e": pa.array([0, None]), "l": pa.array([[0, 3600], [3600]])}
    assert made("age", columns, column="e", at="at").to_pylist() == [2.0, None]
    assert made("age", columns, column="l", at="at", per="minute").to_pylist() == [[120.0, 60.0], [0.0]]
    late = {"at": pa.array([10]), "e": pa.array([11])}
    assert made("age", late, column="e", at="at", on_future="zero").to_pylist() == [0.0]
    assert made("age", late, column="e", at="at", on_future="null").to_pylist() == [None]
    problems = Problems()
    derive(schema([{"name": "out", "kind": "age", "column": "e", "at": "at"}]).derived, late, problems)
    assert "later than the row's time" in problems.error(0).problem and problems.error(0).value == "1970-01-01 00:00:11"


@pytest.mark.parametrize(
    ("times", "unit", "bad"),
    [
        ([1_700_000_000_000, 1_700_000_000], "s", 0),
        ([1_700_000_000, -1], "ms", 1),
        ([0, 1_700_000_000 * 10**9], "us", 1),
        ([2**63 + 5, 0], "ns", 0),
    ],
)
def test_integers_in_another_unit_are_no_times(times: list[int], unit: str, bad: int) -> None:
    kind = pa.uint64() if max(times) >= 2**63 else pa.int64()
    columns = {"e": pa.array(times, kind), "l": pa.array([[time] for time in times], pa.list_(kind))}
    columns |= {"at": pa.array([7_200 * UNITS[unit]] * 2), "early": pa.array([0, 0])}
    specs: list[dict[str, Any]] = [
        {"kind": "time_part", "column": "e"},
        {"kind": "time_part", "column": "l"},
        {"kind": "age", "column": "e", "at": "at", "on_future": "null"},
        {"kind": "age", "column": "l", "at": "at", "on_future": "null"},
        {"kind": "age", "column": "early", "at": "e", "on_future": "null"},
    ]
    for spec in specs:
        problems = Problems()
        derived = schema([{"name": "out", "unit": unit, **spec}]).derived
        out = derive(derived, columns, problems)["out"].to_pylist()
        error = problems.error(bad)
        assert problems.rows().tolist() == [bad] and out[bad] in (None, [None])
        assert (error.column, error.value) == (spec["at" if spec["column"] == "early" else "column"], str(times[bad]))
        assert f"between 1970 and 2200 in {unit}" in error.problem and "`unit`" in str(error.fix)


def test_times_with_and_without_a_zone_have_no_difference() -> None:
    zoned, local = pa.array([0], pa.timestamp("ms", "Europe/Berlin")), pa.array([7_200_000], pa.timestamp("ms"))
    for columns in (
        {"e": zoned, "at": local},
        {"e": local, "at": zoned},
        {"e": pa.array([[0]], pa.list_(local.type)), "at": zoned},
    ):
        with pytest.raises(DataError, match=r"times of '(e|at)' have a time zone, times of '(e|at)' have none"):
            made("age", columns, column="e", at="at")
    later = pa.array([7_200], pa.timestamp("s", "UTC"))
    assert made("age", {"e": zoned, "at": later}, column="e", at="at").to_pylist() == [2.0]
    age = {"name": "out", "kind": "age", "column": "e", "at": "at"}
    dense = [{"name": "out", "default": 0.5}]
    trained = kept(Schema.model_validate({"derived": [age], "dense": dense}), {"e": zoned.type, "at": zoned.type})
    batch = Mapping(trained, {}, labels=False).to_batch(pa.table({"e": pa.nulls(1), "at": later}))
    assert batch.dense.tolist() == [[0.5]], "nothing but nulls may have the zone of the other column"


def test_lookups_and_weighted_pairs_of_maps() -> None:
    kind = pa.map_(pa.string(), pa.float64())
    columns = {"m": pa.array([[("a", 1.0), ("b", 2.0), ("a", 9.0)], None, []], kind), "k": pa.array(["a", "a", None])}
    assert made("lookup", columns, column="m", key="k").to_pylist() == [1.0, None, None]
    assert made("lookup", columns, column="m", value="b").to_pylist() == [2.0, None, None]
    pairs = made("pairs", columns, column="m").to_pylist()
    assert pairs[0][1] == {"id": "b", "weight": 2.0} and pairs[1:] == [None, []]
    spec = {"name": "p", "kind": "pairs", "column": "m"}
    weighted = {"name": "x", "column": "p", "kind": "weighted_id_list", "on_null": "empty", "keep": {"last": 2}}
    whole = Schema.model_validate({"sparse": [{**weighted, "mapping": {"kind": "hash"}}], "derived": [spec]})
    batch = Mapping(whole, {"x": 50}, labels=False).to_batch(pa.table(columns))
    assert batch.sparse.lengths().tolist() == [2, 0, 0] and batch.sparse.weights().tolist() == [2.0, 9.0]


def test_expressions() -> None:
    columns = {"a": pa.array([1, 3, None]), "b c": pa.array([2.0, 0.0, 1.0]), "t": pa.array(["x", "y", "x"])}
    assert made("expression", columns, expression="-(a + 1) / col('b c')").to_pylist() == [-1.0, -math.inf, None]
    assert made("expression", columns, expression="where(t == 'x', max(a, 2), 0)").to_pylist() == [2.0, 0.0, None]
    assert made("expression", columns, expression="coalesce(a, 7) >= 3").to_pylist() == [False, True, True]
    for bad in (
        "__import__('os')",
        "a.b",
        "[a]",
        "a if b else 1",
        "1 < a < 2",
        "log(a, a)",
        "1 + 1",
        "a +",
        "lambda: a",
    ):
        with pytest.raises(ValueError, match="expression"):
            schema([{"name": "out", "kind": "expression", "expression": bad}])


def test_tokens() -> None:
    texts = pa.array(["The cat; the  CAT!", None, "", "a"])
    wanted = [["the", "cat", "the", "cat"], None, [], ["a"]]
    for values in (texts, texts.dictionary_encode(), texts.cast(pa.large_string())):
        assert made("tokens", {"t": values}, column="t").to_pylist() == wanted
    assert made("tokens", {"t": texts}, column="t", ngrams=[1, 2]).to_pylist() == [
        [*wanted[0], "the cat", "cat the", "the cat"],
        None,
        [],
        ["a"],
    ]
    counted = made("tokens", {"t": texts}, column="t", counts=True).to_pylist()
    assert counted[0] == [{"id": "the", "weight": 2.0}, {"id": "cat", "weight": 2.0}] and counted[1:3] == [None, []]
    assert made("tokens", {"t": pa.array(["a,B"])}, column="t", separator=",", lower=False).to_pylist() == [["a", "B"]]


NOT_UTF8 = pa.array([b"a b", b"\xff", None, b"c"], pa.binary())


@pytest.mark.parametrize("kind", [pa.binary(), pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.binary())])
def test_a_text_that_is_not_utf8_is_a_bad_row(kind: pa.DataType) -> None:
    raw = NOT_UTF8.cast(pa.large_binary()) if kind == pa.large_string() else NOT_UTF8
    texts = raw.dictionary_encode() if pa.types.is_dictionary(kind) else raw.view(kind)
    problems = Problems()
    out = derive(schema([{"name": "out", "kind": "tokens", "column": "t"}]).derived, {"t": texts}, problems)["out"]
    assert out.to_pylist() == [["a", "b"], None, None, ["c"]] and problems.rows().tolist() == [1]
    error = problems.error(1)
    assert error.column == "t" and "'out'" in error.problem and str(error.value).startswith(r"t=b'\xff': ")
    assert "xff" not in error.problem, "reasons are counted by problem, and redacted errors keep it"


def test_a_bad_text_that_only_the_dictionary_holds_is_in_no_row() -> None:
    texts = NOT_UTF8.dictionary_encode().take(pa.array([0, 3, 2]))
    assert b"\xff" in texts.dictionary.to_pylist()
    assert made("tokens", {"t": texts}, column="t").to_pylist() == [["a", "b"], ["c"], None]


WIDE = st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.integers(-9, 9), st.integers(2**53 - 2, 2**53 + 2))
EXPRESSIONS = ["a + b", "a * b", "a - b", "a / (b + 0.5)", "abs(a)", "a > b", "(a + 1) / (b + 10)", "log1p(abs(a))"]


@pytest.mark.parametrize("kind", [pa.int64(), pa.float64(), pa.float32(), pa.decimal128(30, 2), pa.uint64()], ids=str)
@settings(max_examples=30)
@given(st.sampled_from(EXPRESSIONS), st.lists(st.tuples(WIDE, WIDE), min_size=1, max_size=6))
def test_the_number_of_a_row_does_not_depend_on_the_rows_beside_it(
    kind: pa.DataType, text: str, rows: list[tuple[int | None, int | None]]
) -> None:
    """Where a null stands beside them, pandas makes floats of integers, and so must no step of the mapping."""
    if kind == pa.uint64():
        rows = [(None if a is None else abs(a), None if b is None else abs(b)) for a, b in rows]
    derived = [{"name": "d", "kind": "expression", "expression": text}]
    dense = [{"name": name, "default": -1.0} for name in ("d", "a")]
    mapping = Schema.model_validate({"derived": derived, "dense": dense})
    numbers = pa.uint64() if kind == pa.uint64() else pa.int64()
    columns = [pa.array(values, numbers).cast(kind, safe=False) for values in zip(*rows, strict=True)]
    table = pa.table(columns, ["a", "b"])

    def dense_of(part: pa.Table) -> Any:
        return mapped(part, mapping, {})[0].dense

    together = dense_of(table)
    alone = np.concatenate([dense_of(table.slice(row, 1)) for row in range(len(rows))])
    assert np.array_equal(together, alone, equal_nan=True)
    with_null = pa.concat_tables([table, pa.table({name: pa.nulls(1, kind) for name in "ab"})])
    assert np.array_equal(dense_of(with_null)[:-1], together, equal_nan=True)


def test_a_value_that_a_column_cannot_be_computed_from_is_a_bad_row() -> None:
    columns = {"m": pa.array([[(1, 2.0)]] * 4, pa.map_(pa.int8(), pa.float64())), "k": pa.array([1, 300, None, 1])}
    columns |= {"t": NOT_UTF8, "n": pa.array([1, 2, 0, None])}
    for spec, bad, wanted in (
        ({"kind": "lookup", "column": "m", "key": "k"}, [1], [2.0, None, None, 2.0]),
        ({"kind": "custom", "columns": ["n"], "function": f"{__name__}:inverse"}, [2], [1.0, 0.5, None, None]),
    ):
        problems = Problems()
        out = derive(schema([{"name": "out", **spec}]).derived, columns, problems)["out"]
        assert out.to_pylist() == wanted and problems.rows().tolist() == bad
        assert problems.reasons() == {f"derived column 'out' ({spec['kind']}) cannot be computed from this row": 1}


def test_overlaps_of_lists() -> None:
    columns = {"a": pa.array([[1, 2, 2, None], [], None, [3]]), "b": pa.array([[2, 1, None], [1], [1], [4]], None)}
    for measure, wanted in (("count", [2, 0, None, 0]), ("ratio", [1.0, 0.0, None, 0.0]), ("any", [1, 0, None, 0])):
        assert made("overlap", columns, columns=["a", "b"], measure=measure).to_pylist() == wanted


def halves(x: pa.Array) -> pa.Array:
    return pa.array([None if v is None else v // 2 for v in x.to_pylist()], pa.int64())


def inverse(x: pa.Array) -> pa.Array:
    return pa.array([None if v is None else 1 / v for v in x.to_pylist()], pa.float64())


def too_few(x: pa.Array) -> pa.Array:
    return x.slice(1)


def breaks(x: pa.Array) -> pa.Array:
    raise ZeroDivisionError("no")


def test_functions_of_users_are_checked() -> None:
    here = __name__
    columns = {"x": pa.array([4, None, 7])}
    assert made("custom", columns, columns=["x"], function=f"{here}:halves").to_pylist() == [2, None, 3]
    for function, problem in (
        ("too_few", "must return one Arrow array of 3 rows, as many as its arguments have; it returned 2 rows"),
        ("breaks", "failed: ZeroDivisionError: no"),
        ("absent", "cannot import"),
    ):
        with pytest.raises(DataError, match=re.escape(problem)):
            made("custom", columns, columns=["x"], function=f"{here}:{function}")


def test_a_chain_is_listed_in_its_order_and_types_that_do_not_fit_are_named() -> None:
    first = {"name": "b", "kind": "buckets", "column": "x", "boundaries": [1.0]}
    second = {"name": "c", "kind": "cross", "columns": ["b", "y"]}
    whole = schema([first, second])
    assert whole.feature_columns == ["x", "y"] and [spec.name for spec in whole.derived_needed] == ["b", "c"]
    with pytest.raises(ValueError, match="derived column 'c' reads 'b': list that one above it"):
        schema([second, first])
    mapping = Mapping(whole, {"id": 9}, labels=False)
    with pytest.raises(DataError, match=r"derived column 'b' \(buckets\) from x: timestamp"):
        mapping.to_batch(pa.table({"x": pa.array([1], pa.timestamp("s")), "y": [1]}))
    with pytest.raises(
        DataError, match=r"derived column 'b' \(buckets\) cannot be computed.*row 1.*x=a: Failed to parse"
    ):
        mapping.to_batch(pa.table({"x": ["1.5", "a"], "y": [1, 2]}))
    with pytest.raises(DataError, match="integers or texts, not double; put numbers into buckets"):
        made("cross", {"x": pa.array([1.5]), "y": pa.array([1])}, columns=["x", "y"])


def test_how_a_column_is_derived_is_in_the_fingerprint() -> None:
    def of(edge: float) -> dict[str, Any]:
        first = {"name": "b", "kind": "buckets", "column": "x", "boundaries": [edge]}
        return mapping_fingerprint(schema([first, {"name": "c", "kind": "cross", "columns": ["b", "y"]}]), {"id": 9})

    assert of(1.0) == of(1.0) != of(2.0) and len(of(1.0)["id"]["derived"]) == 2
    assert "derived" not in mapping_fingerprint(Schema.model_validate({"sparse": [{"name": "x"}]}), {"x": 9})["x"]


ALL: dict[str, Any] = {
    "derived": [
        {"name": "bucket", "kind": "buckets", "column": "x", "boundaries": [-1.0, 0.0, 7.5]},
        {"name": "none", "kind": "missing", "column": "x"},
        {"name": "pair", "kind": "cross", "columns": ["bucket", "city"]},
        {"name": "grid", "kind": "cross", "columns": ["city", "tags", "seen"]},
        {"name": "hour", "kind": "time_part", "column": "at", "zone": "Europe/Berlin"},
        {"name": "age", "kind": "age", "column": "before", "at": "at", "on_future": "null"},
        {"name": "rate", "kind": "lookup", "column": "rates", "key": "city"},
        {"name": "math", "kind": "expression", "expression": "min(x, 5) / 3 + where(rate > 1, 1, 0)"},
        {"name": "words", "kind": "tokens", "column": "city", "ngrams": [1, 2], "counts": True},
        {"name": "both", "kind": "overlap", "columns": ["tags", "seen"], "measure": "ratio"},
        {"name": "rated", "kind": "pairs", "column": "rates"},
        {"name": "own", "kind": "custom", "columns": ["n"], "function": f"{__name__}:halves"},
    ],
    "dense": [{"name": name, "default": 0.0} for name in ("none", "age", "rate", "math", "both", "own")],
    "sparse": [
        {"name": name, "kind": kind, "on_null": "empty", "mapping": {"kind": "hash"}}
        for name, kind in (
            ("bucket", "id"), ("pair", "id"), ("grid", "id_list"), ("hour", "id"),
            ("words", "weighted_id_list"), ("rated", "weighted_id_list"),
        )
    ],
}  # fmt: skip
TYPES = {
    "x": pa.float64(),
    "n": pa.int64(),
    "city": pa.string(),
    "tags": pa.list_(pa.string()),
    "seen": pa.list_(pa.string()),
    "at": pa.timestamp("ms"),
    "before": pa.timestamp("ms"),
    "rates": pa.map_(pa.string(), pa.float64()),
}
ROWS_OF = {feature["name"]: 1000 for feature in ALL["sparse"]}
TEXTS = ["a", "b c", "b", "Ünï çödé", "", "the b c"]


def drawn_rows(seed: int, count: int) -> list[dict[str, Any]]:
    """Rows with nulls, empty lists, repeated and odd values."""
    draw = random.Random(seed)

    def maybe(make: Any) -> Any:
        return None if draw.random() < 0.15 else make()

    def text() -> str:
        return draw.choice(TEXTS)

    def moment() -> datetime:
        return (EPOCH + timedelta(milliseconds=draw.randrange(1 << 40))).replace(tzinfo=None)

    def row() -> dict[str, Any]:
        return {
            "x": maybe(lambda: draw.choice([-1.0, 0.0, 7.5, draw.uniform(-1e6, 1e6), draw.gauss(0, 3)])),
            "n": maybe(lambda: draw.randrange(-(1 << 40), 1 << 40)),
            "city": maybe(text),
            "tags": maybe(lambda: [maybe(text) for _ in range(draw.randrange(4))]),
            "seen": maybe(lambda: [text() for _ in range(draw.randrange(4))]),
            "at": maybe(moment),
            "before": maybe(moment),
            "rates": maybe(lambda: {text(): draw.uniform(-9, 9) for _ in range(draw.randrange(3))}),
        }

    return [row() for _ in range(count)]


def table_of(rows: list[dict[str, Any]]) -> pa.Table:
    def plain(name: str, value: Any) -> Any:
        return list(value.items()) if name == "rates" and value is not None else value

    return pa.table({name: pa.array([plain(name, row[name]) for row in rows], kind) for name, kind in TYPES.items()})


def as_request(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return json.loads(json.dumps(rows, default=datetime.isoformat))  # type: ignore[no-any-return]


def alike(rows: list[dict[str, Any]]) -> None:
    """Rows mapped together as training does, in another order, one by one, and as a service gets them."""
    table = table_of(rows)
    whole = kept(Schema.model_validate(ALL), TYPES)
    whole = Schema.model_validate(json.loads(whole.model_dump_json()))  # as runs and exports keep it
    mapping = Mapping(whole, ROWS_OF, labels=False)
    together = mapping.to_batch(table)
    for other in (
        mapping.to_batch(as_request(rows)),
        mapping.to_batch({name: [row[name] for row in as_request(rows)] for name in TYPES}),
    ):
        same(together, other)
    half = len(rows) // 2
    dense = np.concatenate([mapping.to_batch(part).dense.numpy() for part in (table[:half], table[half:])])
    assert np.array_equal(dense, together.dense.numpy(), equal_nan=True)
    order = np.random.default_rng(0).permutation(len(rows))
    shuffled, straight = (mapped(table, whole, ROWS_OF, how)[0] for how in (order, None))
    assert np.array_equal(shuffled.dense, straight.dense[order])
    for one, other in zip(shuffled.ids, straight.ids, strict=True):
        assert np.array_equal(one.values, other.take(order).values)
    slow(rows, straight)


def same(one: Any, other: Any) -> None:
    assert np.array_equal(one.dense.numpy(), other.dense.numpy())
    for part in ("values", "lengths", "weights_or_none"):
        first, second = (getattr(batch.sparse, part)() for batch in (one, other))
        assert (first is None and second is None) or np.array_equal(first.numpy(), second.numpy()), part


def slow(rows: list[dict[str, Any]], found: Any) -> None:
    """The numbers and the lengths of bags, in plain Python."""
    for number, row in enumerate(rows):
        x, city, rates = row["x"], row["city"], row["rates"] or {}
        rate = rates.get(city)
        late = row["at"] is None or row["before"] is None or row["before"] > row["at"]
        age = 0.0 if late else (row["at"] - row["before"]) / timedelta(hours=1)
        math = 0.0 if x is None or rate is None else min(x, 5.0) / 3 + (1 if rate > 1 else 0)
        both = 0.0
        if row["tags"] is not None and row["seen"] is not None:
            own = {*row["tags"]} - {None}
            both = len(own & {*row["seen"]}) / max(len(own), 1)
        half = 0.0 if row["n"] is None else row["n"] // 2
        wanted = [float(x is None), age, rate or 0.0, math, both, half]
        assert np.allclose(found.dense[number], np.array(wanted, np.float32), rtol=1e-5)
        words = re.findall(r"\w+", (city or "").lower())
        bigrams = [" ".join(pair) for pair in zip(words, words[1:], strict=False)]
        tags = [] if None in (city, row["tags"], row["seen"]) else [t for t in row["tags"] if t is not None]
        lengths = [
            x is not None,
            x is not None and city is not None,
            len(tags) * len(row["seen"] or []),
            row["at"] is not None,
            len(Counter(words + bigrams)),
            len(rates),
        ]
        for ids, length in zip(found.ids, lengths, strict=True):
            start, stop = ids.span(number, number + 1)
            assert stop - start == int(length)


@settings(max_examples=20, derandomize=True, phases=[Phase.generate])
@given(st.integers(0, 1 << 32))
def test_equal_values_in_training_and_in_a_service(seed: int) -> None:
    alike(drawn_rows(seed, 200))


@pytest.mark.long
@settings(max_examples=40, phases=[Phase.generate])
@given(st.integers(0, 1 << 32))
def test_equal_values_of_many_drawn_rows(seed: int) -> None:
    alike(drawn_rows(seed, 200))


def test_buckets_of_equal_frequency_leave_common_values_their_own(tmp_path: Path) -> None:
    raw = {"derived": [{"name": "b", "kind": "buckets", "column": "x", "quantiles": 4}], "sparse": [{"name": "b"}]}

    def edges(*numbers: float) -> list[float]:
        pq.write_table(pa.table({"x": numbers, "label": [0] * len(numbers)}), tmp_path / "x.parquet")
        schema = Schema.model_validate(raw)
        fitted = fit(Manifest.read(str(tmp_path), for_reading(schema)), schema)
        return fitted.derived[0].model_dump()["boundaries"]  # type: ignore[no-any-return]

    assert len(edges(*map(float, range(100)))) == 3
    found = edges(*[0.0] * 95, 1.0, 2.0, 3.0, 4.0, 5.0)
    assert found[0] == 1.0 and len(found) == 3, "zero is a bucket, and the others are divided"
    assert edges(3.0, 3.0) == [3.0]


def fitted_config(folder: Path) -> tuple[Schema, DataSet]:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.normal(10, 2, 900), np.full(100, 1e6)])  # the evaluated days are another world
    day = np.repeat([1, 2], [900, 100])
    pq.write_table(pa.table({"x": x, "day": day, "label": np.arange(1000) % 2}), folder / "x.parquet")
    raw = {
        "derived": [{"name": "b", "kind": "buckets", "column": "x", "quantiles": 8}],
        "sparse": [{"name": "b"}],
        "dense": [
            {"name": "s", "column": "x", "transforms": [{"kind": "log1p"}, {"kind": "standardize"}]},
            {"name": "m", "column": "x", "transforms": [{"kind": "min_max"}]},
            {"name": "q", "column": "x", "transforms": [{"kind": "quantile", "quantiles": 10}]},
        ],
    }
    data = {"path": str(folder / "x.parquet"), "filters": [["day", "<", 2]]}
    return Schema.model_validate(raw), DataSet.model_validate(data)


def test_statistics_are_fitted_to_the_training_period_only(tmp_path: Path) -> None:
    schema, data = fitted_config(tmp_path)
    assert unfitted_names(schema) == ["b", "s", "m", "q"]
    with pytest.raises(DataError, match="rayrec data fit"):
        Manifest.of(data, schema)
    done = fit(Manifest.of(data, for_reading(schema)), schema)
    assert not unfitted_names(done) and unfitted_names(without_statistics(done)) == ["b", "s", "m", "q"]
    numbers = pq.read_table(tmp_path / "x.parquet")["x"].to_numpy()[:900]
    standard = done.dense[0].transforms[1].model_dump()
    assert standard["mean"] == pytest.approx(np.log1p(numbers).mean()) and standard["std"] > 0
    ends = done.dense[1].transforms[0].model_dump()
    assert (ends["lowest"], ends["highest"]) == (numbers.min(), numbers.max())
    assert len(done.derived[0].model_dump()["boundaries"]) == 7
    again = Schema.model_validate({**schema.model_dump(exclude_unset=True), **statistics(done)})
    assert again.dense == done.dense and again.derived == done.derived
    rows, _ = mapped(pq.read_table(tmp_path / "x.parquet"), done, {"b": 8}, labelled=True)
    assert np.bincount(rows.ids[0].values[:900], minlength=8) == pytest.approx(112, abs=2)
    assert rows.dense[:900, 0].std() == pytest.approx(1, abs=1e-3) and rows.dense[900:, 1:].max() == 1.0
    everything = fit(Manifest.of(DataSet(path=data.path), for_reading(schema)), schema)
    assert everything.derived != done.derived and everything.dense[0] != done.dense[0], "it would notice a leak"


def test_derived_columns_are_proposed(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    x = pa.array(rng.lognormal(3, 2, 2000), mask=rng.random(2000) < 0.1)
    at = pa.array([EPOCH + timedelta(hours=31 * n + 9999) for n in range(2000)], pa.timestamp("s"))
    rows = {"user_id": rng.integers(0, 30, 2000), "price": x, "at": at, "label": rng.integers(0, 2, 2000)}
    pq.write_table(pa.table(rows), tmp_path / "x.parquet")
    proposal = inspect(str(tmp_path / "x.parquet"), label="label").proposal()
    kinds = {spec["name"]: spec["kind"] for spec in proposal["schema"]["derived"]}
    assert kinds == {
        "price_bucket": "buckets",
        "price_missing": "missing",
        "at_hour": "time_part",
        "at_weekday": "time_part",
    }
    whole = Schema.model_validate(proposal["schema"])
    sizes = {name: table["rows"] for table in proposal["tables"] for name in table["features"]}
    assert not mapped(pq.read_table(tmp_path / "x.parquet"), whole, sizes, labelled=True)[1]


def test_the_command_writes_statistics_into_the_config(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    schema, data = fitted_config(tmp_path)
    raw = {
        "name": "a",
        "data": {"train": data.model_dump(mode="json", exclude_unset=True)},
        "schema": schema.model_dump(mode="json", exclude_unset=True),
        "tables": [{"name": "b", "rows": 8, "dim": 4, "features": ["b"]}],
        "model": {"name": "dlrm", "args": {"dense_arch": [8, 4], "over_arch": [4, 1]}},
        "storage": {"path": str(tmp_path)},
    }
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(raw))
    command = ["data", "fit", str(tmp_path / "a.yaml"), "--out", str(tmp_path / "b.yaml")]
    assert run(command) == 0 and "fitted b, s, m, q to" in capsys.readouterr().out
    written = Schema.model_validate(yaml.safe_load((tmp_path / "b.yaml").read_text())["schema"])
    assert written == fit(Manifest.of(data, for_reading(schema)), schema)
