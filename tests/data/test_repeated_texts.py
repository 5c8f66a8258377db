"""Texts that repeat are read as dictionaries, which changes no batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import BatchStream, Condition, Cursor, Manifest, ReadOptions, Schema
from rayrec.data.source.slices import read_slices, slices_of
from rayrec.storage import Patience

ROWS_OF = {"city": 64, "shop": 64, "raw": 64, "code": 64, "code_x": 64}


def schema(vocabulary: Path) -> Schema:
    hashed: dict[str, Any] = {"kind": "hash", "seed": 3}
    return Schema.model_validate(
        {
            "label": {"column": "label"},
            "derived": [{"name": "code_x", "kind": "cross", "columns": ["code", "label_like"]}],
            "sparse": [
                {"name": "city", "mapping": hashed, "on_null": "empty"},
                {"name": "shop", "mapping": {"kind": "vocabulary", "path": str(vocabulary), "oov_rows": 1}},
                {"name": "raw", "mapping": hashed, "on_null": "default", "default": "none"},
                {"name": "code", "mapping": hashed},
                {"name": "code_x", "mapping": hashed},
            ],
        }
    )


def part(seed: int, rows: int, distinct: int) -> pa.Table:
    draw = np.random.default_rng(seed)
    city = [None if n % 5 == 0 else f"city {n}" for n in draw.integers(0, distinct, rows)]
    return pa.table(
        {
            "label": draw.integers(0, 2, rows),
            "label_like": draw.integers(0, 9, rows),
            "city": pa.array(city, pa.string()),
            "shop": pa.array([f"shop {n:05d}" for n in draw.integers(0, distinct, rows)]),
            "raw": pa.array([None if n == 1 else bytes([255, n % 200]) for n in draw.integers(0, distinct, rows)]),
            "code": pa.array([f"c{n}" for n in draw.integers(0, distinct, rows)]),
        }
    )


def batches(folder: Path, form: Schema, filters: tuple[Condition, ...]) -> list[Any]:
    manifest = Manifest.read(str(folder), form, window_rows=300, filters=filters)
    where: dict[str, Any] = {"rank": 0, "world_size": 1, "options": ReadOptions(reader="local")}
    with BatchStream(manifest, form, ROWS_OF, batch_rows=64, seed=0, cursor=Cursor.start(0), **where) as stream:
        return [batch for batch, _ in stream]


@pytest.mark.parametrize("filters", [(), (Condition.parse(["city", "!=", "city 3"]),)])
def test_batches_are_those_of_plain_texts(tmp_path: Path, filters: tuple[Condition, ...]) -> None:
    parts = [part(0, 700, 12), part(1, 400, 100_000), part(2, 500, 12), part(3, 90, 3)]
    parts[2] = parts[2].set_column(2, "city", pa.nulls(500))
    for number, rows in enumerate(parts):
        for name, encoded in (("plain", False), ("encoded", True)):
            (tmp_path / name).mkdir(exist_ok=True)
            pq.write_table(rows, tmp_path / name / f"{number}.parquet", row_group_size=250, use_dictionary=encoded)
    vocabulary = tmp_path / "shops.txt"
    vocabulary.write_text("\n".join(f"shop {n:05d}" for n in range(8)) + "\n")
    form = schema(vocabulary)
    plain, encoded = (batches(tmp_path / name, form, filters) for name in ("plain", "encoded"))
    assert len(plain) == len(encoded) > 10
    for left, right in zip(plain, encoded, strict=True):
        assert left.sparse.keys() == right.sparse.keys()
        assert left.sparse.lengths().equal(right.sparse.lengths())
        assert left.sparse.values().equal(right.sparse.values())

    manifest = Manifest.read(str(tmp_path / "encoded"), form, window_rows=300)
    table, _ = read_slices(slices_of(manifest, 0), manifest.columns, Patience(), encoded=form.plain_id_columns)
    assert form.plain_id_columns == {"city", "shop", "raw"}  # `code` is also crossed
    types = {field.name for field in table.schema if pa.types.is_dictionary(field.type)}
    assert types <= form.plain_id_columns and types
