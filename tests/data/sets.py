"""Small data sets for the tests of the data path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data import Schema

USERS, GENRES, CITIES = 40, 6, 16
ROWS_OF = {"row": 1_000_000, "user": USERS, "genres": GENRES, "city": CITIES}

SCHEMA = Schema.model_validate(
    {
        "label": {"column": "label"},
        "dense": [
            {"name": "age", "transforms": [{"kind": "standardize", "mean": 30.0, "std": 10.0}]},
            {"name": "price", "default": 0.0},
        ],
        "sparse": [
            {"name": "row", "mapping": {"kind": "identity"}},
            {"name": "user", "column": "user_id", "kind": "id"},
            {"name": "genres", "kind": "id_list"},
            {"name": "city", "mapping": {"kind": "hash", "seed": 1}},
        ],
    }
)


def table(rows: int, first: int = 0, **replaced: Any) -> pa.Table:
    """`rows` good rows numbered from `first` in the column `row`; columns can be replaced."""
    rng = np.random.default_rng(first)
    lengths = rng.integers(0, 4, rows)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    columns: dict[str, Any] = {
        "row": np.arange(first, first + rows),
        "label": rng.integers(0, 2, rows),
        "age": rng.uniform(10, 60, rows),
        "price": pa.array([None if i % 7 == 0 else float(i) for i in range(rows)], pa.float64()),
        "user_id": rng.integers(0, USERS, rows),
        "genres": pa.ListArray.from_arrays(pa.array(offsets), pa.array(rng.integers(0, GENRES, lengths.sum()))),
        "city": pa.array([f"city {i}" for i in rng.integers(0, 50, rows)], pa.string()),
        "unused": np.zeros(rows),
    }
    return pa.table(columns | replaced)


def write(folder: Path, sizes: list[int], row_group_size: int = 100, first: int = 0) -> Path:
    """One file a size, rows numbered through from `first`."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, rows in enumerate(sizes):
        pq.write_table(table(rows, first), folder / f"part-{number:03d}.parquet", row_group_size=row_group_size)
        first += rows
    return folder
