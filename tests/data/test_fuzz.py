"""Random schemas on random tables: mapped as the slow reference says, or refused by an error that names the column."""

from __future__ import annotations

import decimal
import random
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import BatchStream, Cursor, DataError, Manifest, ReadOptions, Schema, to_batch
from rayrec.data.mapping.column_types import check_types
from rayrec.models import Batch
from tests.data.reference import Expected, expect

INTS = [pa.int8(), pa.int16(), pa.int32(), pa.int64(), pa.uint8(), pa.uint16(), pa.uint32(), pa.uint64()]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.string_view()]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
DECIMAL = pa.decimal128(20, 3)
ODD = [pa.timestamp("us"), pa.date32(), DECIMAL, pa.float64(), pa.bool_(), pa.null()]


def scalar(kind: pa.DataType, rng: random.Random, wild: float) -> Any:
    """A value of the type; with probability `wild` null, an edge of its range, or not a number."""
    odd = rng.random() < wild
    if odd and rng.random() < 0.5:
        return None
    if pa.types.is_dictionary(kind):
        return scalar(kind.value_type, rng, 0.0)
    if pa.types.is_integer(kind):
        bits, signed = kind.bit_width, pa.types.is_signed_integer(kind)
        edges = [-(2 ** (bits - 1)), 2 ** (bits - 1) - 1, -1] if signed else [2**bits - 1]
        return rng.choice(edges) if odd else rng.randrange(20)
    if pa.types.is_floating(kind):
        if odd:
            return rng.choice([float("nan"), float("inf"), float("-inf"), -3.0, 1e300])
        return float(np.float16(rng.uniform(0, 50)))
    if pa.types.is_boolean(kind):
        return rng.random() < 0.5
    if pa.types.is_decimal(kind):
        return decimal.Decimal(rng.randrange(-500 if odd else 0, 5000)) / 100
    if pa.types.is_timestamp(kind):
        return datetime(2020, 1, rng.randrange(1, 28))
    if pa.types.is_date(kind):
        return datetime(2020, 1, rng.randrange(1, 28)).date()
    if pa.types.is_null(kind):
        return None
    text = rng.choice(["", "a", "bcd", "ü☃", "x" * 50, str(rng.randrange(30))])
    return text.encode() if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) else text


def value(kind: pa.DataType, rng: random.Random, wild: float) -> Any:
    if pa.types.is_struct(kind):
        if rng.random() < wild / 4:
            return None
        return {field.name: value(field.type, rng, wild) for field in kind.fields}
    if hasattr(kind, "value_type") and not pa.types.is_dictionary(kind):
        if rng.random() < wild / 4:
            return None
        length = kind.list_size if pa.types.is_fixed_size_list(kind) else rng.choice([0, 0, 1, 2, 5])
        return [value(kind.value_type, rng, wild / 4) for _ in range(length)]
    return scalar(kind, rng, wild)


def array(kind: pa.DataType, rows: int, rng: random.Random, wild: float) -> pa.Array:
    values = [value(kind, rng, wild) for _ in range(rows)]
    if pa.types.is_floating(kind) and kind.bit_width == 16:
        return pa.array([None if v is None else np.float16(min(v, 6e4)) for v in values], kind)
    return pa.array(values, kind)


def encoded(kind: pa.DataType, rng: random.Random) -> pa.DataType:
    """Sometimes dictionary-encoded."""
    if rng.random() < 0.15 and kind in (pa.string(), pa.int64(), pa.int32(), pa.float64()):
        return pa.dictionary(pa.int32(), kind)
    return kind


def listed(kind: pa.DataType, rng: random.Random, length: int | None = None) -> pa.DataType:
    makers = [pa.list_, pa.large_list, lambda k: pa.list_(k, length or 3)]
    return rng.choice(makers)(kind)


def draw_sparse(name: str, rng: random.Random) -> tuple[dict[str, Any], dict[str, pa.DataType]]:
    kind = rng.choice(["id", "id", "id_list", "id_list", "weighted_id_list"])
    hashed = rng.random() < 0.5
    leaf = encoded(rng.choice(TEXTS if hashed and rng.random() < 0.6 else INTS), rng)
    if rng.random() < 0.06:
        leaf = rng.choice([*ODD, pa.list_(pa.int64()), pa.string()])
    mapping: dict[str, Any] = {"kind": "hash", "seed": rng.randrange(3)} if hashed else {"kind": "identity"}
    if not hashed:
        mapping["bounds"] = rng.choice(["error", "clip", "drop"])
    feature: dict[str, Any] = {"name": name, "kind": kind, "mapping": mapping}
    feature["on_null"] = rng.choice(["error", "empty", "default"])
    if feature["on_null"] == "default":
        text = (pa.types.is_dictionary(leaf) and leaf.value_type == pa.string()) or leaf in TEXTS
        feature["default"] = "none" if text else 2
    columns = {name: leaf}
    if kind != "id":
        if rng.random() < 0.4:
            feature |= {"max_length": rng.randrange(1, 4), "keep": rng.choice(["first", "last"])}
        columns[name] = listed(leaf, rng)
    if kind == "weighted_id_list":
        weight = rng.choice([*FLOATS[1:], pa.int32()])
        if rng.random() < 0.5:
            columns[name] = listed(pa.struct([("id", leaf), ("weight", weight)]), rng)
        else:
            feature["weight_column"] = f"{name}_weights"
            columns[f"{name}_weights"] = pa.list_(weight)
    if kind == "id" and rng.random() < 0.03:
        columns[name] = pa.list_(leaf)
    return feature, columns


def draw_dense(name: str, rng: random.Random) -> tuple[dict[str, Any], dict[str, pa.DataType]]:
    kind = encoded(rng.choice([*FLOATS, *INTS, pa.bool_(), DECIMAL]), rng)
    if rng.random() < 0.04:
        kind = rng.choice([pa.string(), pa.timestamp("s"), pa.list_(pa.list_(pa.int8()))])
    feature: dict[str, Any] = {"name": name}
    if rng.random() < 0.5:
        feature["default"] = rng.choice([0.0, 1.5])
    steps: list[dict[str, Any]] = [
        {"kind": "log1p"},
        {"kind": "clip", "lowest": 0.0, "highest": rng.choice([None, 10.0])},
        {"kind": "standardize", "mean": 3.0, "std": 2.0},
        {"kind": "min_max", "lowest": -2.0, "highest": 9.0},
    ]
    if rng.random() < 0.6:
        feature["transforms"] = rng.sample(steps, rng.randrange(1, 4))
    if rng.random() < 0.25:
        feature["width"] = rng.randrange(2, 4)
        kind = listed(kind, rng, feature["width"])
    return feature, {name: kind}


def draw_targets(rng: random.Random) -> tuple[dict[str, Any], dict[str, pa.DataType]]:
    """Sometimes a weight for every row, and several labels, the first of them the column `label`."""
    targets: dict[str, Any] = {}
    columns = {}
    if rng.random() < 0.5:
        kind = encoded(rng.choice([*FLOATS, *INTS, pa.bool_(), DECIMAL]), rng)
        if rng.random() < 0.04:
            kind = rng.choice([pa.string(), pa.timestamp("s"), pa.list_(pa.float64())])
        targets["sample_weight"] = {"column": "importance"}
        columns["importance"] = kind
    if rng.random() < 0.4:
        others = [f"l{i}" for i in range(rng.randrange(0, 3))]
        tasks = [{"name": n, "on_null": rng.choice(["error", "ignore"])} for n in others]
        targets["labels"] = [{"name": "first", "column": "label"}, *tasks]
    if rng.random() < 0.3:
        kind = encoded(rng.choice([*INTS, *TEXTS]), rng)
        targets["group"] = {"column": "who"}
        columns["who"] = kind if rng.random() > 0.04 else rng.choice([pa.float32(), pa.list_(pa.int64())])
    if rng.random() < 0.3:
        dates = [pa.date32(), pa.timestamp("ms"), pa.timestamp("us", tz="UTC"), pa.timestamp("ns")]
        kind = encoded(rng.choice([*INTS, *dates]), rng)
        targets["timestamp"] = {"column": "at", "unit": rng.choice(["s", "ms"])}
        columns["at"] = kind if rng.random() > 0.04 else rng.choice([pa.float64(), pa.string()])
    return targets, columns


def draw_label(on_null: str, rows: int, rng: random.Random, wild: float) -> pa.Array:
    missing = 0.3 if on_null == "ignore" else wild / 20
    values = [None if rng.random() < missing else rng.randrange(2) for _ in range(rows)]
    if rows and rng.random() < wild / 4:
        values[-1] = 3
    kind = rng.choice([pa.int8(), pa.float32(), pa.dictionary(pa.int32(), pa.int64()), pa.bool_()])
    return pa.array([None if v is None else bool(v) for v in values] if kind == pa.bool_() else values, kind)


def draw(seed: int) -> tuple[Schema, pa.Table, dict[str, int]]:
    rng = random.Random(seed)
    dense = [draw_dense(f"d{i}", rng) for i in range(rng.randrange(0, 3))]
    sparse = [draw_sparse(f"s{i}", rng) for i in range(rng.randrange(0 if dense else 1, 4))]
    target = random.Random(seed + 1_000_000)
    targets, more = draw_targets(target)
    features = {"dense": [f for f, _ in dense], "sparse": [f for f, _ in sparse]}
    schema = Schema.model_validate({**features, **targets})
    types = {n: k for _, columns in (*dense, *sparse) for n, k in columns.items()}
    rows, wild = rng.choice([0, 1, 7, 40]), rng.choice([0.0, 0.0, 0.02, 0.2])
    extra = rng.choice([0, 3])  # rows before and after, cut off again: arrays with offsets
    columns = {n: array(k, rows + 2 * extra, rng, wild) for n, k in types.items()}
    for feature in schema.sparse:
        if feature.weight_column and rng.random() > wild:
            ids = columns[feature.column].to_pylist()
            if all(i is None or isinstance(i, list) for i in ids):
                kind = types[feature.weight_column]
                same = [[value(kind.value_type, rng, wild / 4) for _ in i or []] for i in ids]
                columns[feature.weight_column] = pa.array(same, kind)
    label = [1 if rng.random() < 0.5 else 0 for _ in range(rows + 2 * extra)]
    if rng.random() < wild:
        label[len(label) // 2 :] = [2] * (len(label) - len(label) // 2)
    columns["label"] = pa.array(label, rng.choice([pa.int8(), pa.int64(), pa.float32()]))
    columns |= {n: array(k, rows + 2 * extra, target, wild) for n, k in more.items()}
    for task in schema.labels[1:]:
        columns[task.column] = draw_label(task.on_null, rows + 2 * extra, target, wild)
    return schema, pa.table(columns).slice(extra, rows), {f.name: rng.choice([5, 25, 1000]) for f in schema.sparse}


def assert_batch(batch: Batch, expected: Expected, schema: Schema) -> None:
    label = np.array(expected.label, np.float32).reshape(batch.rows, *schema.label_shape)
    np.testing.assert_array_equal(batch.label.numpy(), label)
    np.testing.assert_allclose(
        batch.dense.numpy(), np.array(expected.dense).reshape(batch.rows, schema.num_dense), rtol=1e-5, atol=1e-6
    )
    if schema.sample_weight is None:
        assert batch.weight is None
    else:
        assert batch.weight is not None and batch.weight.tolist() == expected.weight
    for present, found, wanted in (
        (schema.group, batch.group, expected.group),
        (schema.timestamp, batch.time, expected.time),
    ):
        assert (found is None) is (present is None)
        assert found is None or found.tolist() == wanted
    assert batch.sparse.keys() == schema.sparse_names
    lengths = batch.sparse.lengths().reshape(len(schema.sparse), batch.rows).tolist()
    bags = [expected.bags[n] for n in schema.sparse_names]
    assert lengths == [[len(b) for b in feature] for feature in bags]
    assert batch.sparse.values().tolist() == [i for feature in bags for b in feature for i in b]
    if schema.weighted:
        weights = [w for n in schema.sparse_names for b in expected.weights[n] for w in b]
        np.testing.assert_allclose(batch.sparse.weights().numpy(), np.array(weights), rtol=1e-6)


@pytest.mark.parametrize("block", range(10))
def test_mapping_agrees_with_the_reference(block: int) -> None:
    mapped = refused = bad = 0
    for seed in range(block * 60, (block + 1) * 60):
        schema, table, rows_of = draw(seed)
        try:
            check_types(schema, table.schema, "x")
        except DataError as error:
            assert error.column in table.column_names and error.fix
            refused += 1
            continue
        expected = expect(table.to_pylist(), schema, rows_of)
        if expected.bad_rows:
            with pytest.raises(DataError) as caught:
                to_batch(table, schema, rows_of)
            assert caught.value.row == expected.bad_rows[0], f"seed {seed}: {caught.value}"
            assert caught.value.column in table.column_names and caught.value.fix
            bad += 1
        else:
            assert_batch(to_batch(table, schema, rows_of), expected, schema)
            mapped += 1
    assert mapped > 15 and refused > 2 and bad > 5, (mapped, refused, bad)


def test_parquet_changes_nothing(tmp_path: Path) -> None:
    """The same through files, the manifest, windows and the stream."""
    streamed = 0
    for seed in range(1000, 1150):
        schema, table, rows_of = draw(seed)
        file = tmp_path / f"{seed}.parquet"
        try:
            pq.write_table(table, file, row_group_size=11)
        except pa.ArrowException:
            continue  # a type that Parquet does not have
        try:
            manifest = Manifest.read(str(file), schema, window_rows=16)
        except DataError as error:
            assert error.file == str(file)
            continue
        expected = expect(table.to_pylist(), schema, rows_of)
        options = ReadOptions(reader="local")
        with BatchStream(
            manifest,
            schema,
            rows_of,
            batch_rows=100,
            rank=0,
            world_size=1,
            cursor=Cursor.start(0),
            seed=0,
            shuffle=False,
            options=options,
        ) as batches:
            if expected.bad_rows:
                with pytest.raises(DataError) as caught:
                    next(batches)
                assert caught.value.row == expected.bad_rows[0]
                assert caught.value.row_group == expected.bad_rows[0] // 11
            else:
                assert_batch(next(batches)[0], expected, schema)
                streamed += 1
    assert streamed > 40
