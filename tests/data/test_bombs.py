"""Small Parquet files that would decode to many gigabytes end in an error that names them, in bounded memory."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import BadRows, BatchStream, Cursor, DataError, Manifest, ReadOptions, Schema
from rayrec.data.source import slices

SCHEMA = Schema.model_validate(
    {
        "label": {"column": "label"},
        "dense": [{"name": "d"}],
        "sparse": [
            {"name": "name", "mapping": {"kind": "hash"}},
            {"name": "history", "kind": "id_list", "mapping": {"kind": "hash"}},
        ],
    }
)
MOST_FILE_BYTES = 200_000
MOST_MEMORY = 300 << 20  # beyond what the process had


def columns(rows: int) -> dict[str, pa.Array]:
    return {
        "label": pa.array(np.zeros(rows, np.int8)),
        "d": pa.array(np.zeros(rows, np.float32)),
        "name": pa.array(["a"] * rows),
        "history": pa.array([[1]] * rows, pa.list_(pa.int8())),
    }


def long_text() -> dict[str, pa.Array]:
    """4,000 rows of one text of 20 MB: 80 GB."""
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(4000, np.int32)), pa.array(["x" * 20_000_000]))
    return columns(4000) | {"name": texts}


def long_list() -> dict[str, pa.Array]:
    """Two rows of 10M ids each, as rows: 160 MB, and as much again for every copy."""
    offsets = pa.array([0, 10_000_000, 20_000_000], pa.int32())
    return columns(2) | {"history": pa.ListArray.from_arrays(offsets, pa.array(np.zeros(20_000_000, np.int8)))}


@pytest.mark.parametrize("policy", ["error", "skip"])
@pytest.mark.parametrize(("make", "column"), [(long_text, "name"), (long_list, None)])
def test_a_bomb_is_named_before_it_is_decoded(tmp_path: Path, monkeypatch, make, column, policy) -> None:
    if make is long_list:
        monkeypatch.setattr(slices, "MAX_BYTES", 64 << 20)
    file = tmp_path / "bomb.parquet"
    pq.write_table(pa.table(make()), file, compression="zstd", store_schema=False)
    pq.write_table(pa.table(columns(100)), tmp_path / "good.parquet", store_schema=False)
    assert file.stat().st_size < MOST_FILE_BYTES
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    manifest = Manifest.read(str(tmp_path), SCHEMA)
    options = ReadOptions(reader="local", bad_rows=BadRows(policy=policy, limit=100_000))
    with BatchStream(
        manifest,
        SCHEMA,
        {"name": 10, "history": 10},
        batch_rows=50,
        rank=0,
        world_size=1,
        cursor=Cursor.start(0),
        seed=0,
        options=options,
    ) as stream:
        if policy == "error":
            with pytest.raises(DataError, match=r"GB of memory \(limit") as caught:
                list(stream)
            error = caught.value
        else:
            assert sum(batch.rows for batch, _ in stream) == 100, "the rows of the other file"
            error = stream.skipped.samples[0]
    assert error.file == str(file) and error.row_group == 0 and error.column == column
    assert "smaller row groups" in str(error)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before < MOST_MEMORY


def test_many_rows_of_little_are_read_in_parts(tmp_path: Path) -> None:
    """20M equal rows in a few kilobytes are an honest file: it is decoded a window at a time."""
    rows = 20_000_000
    table = {"label": pa.array(np.zeros(rows, np.int8)), "d": pa.array(np.zeros(rows, np.float32))}
    file = tmp_path / "long.parquet"
    pq.write_table(pa.table(table), file, compression="zstd", row_group_size=rows, store_schema=False)
    assert file.stat().st_size < MOST_FILE_BYTES
    schema = Schema.model_validate({"label": {"column": "label"}, "dense": [{"name": "d"}], "sparse": []})
    manifest = Manifest.read(str(tmp_path), schema)
    assert max(manifest.windows.rows) < 1 << 18
