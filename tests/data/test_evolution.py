"""Files of one data set whose columns differ: narrower types are promoted, layouts are alike, missing columns are null
where the schema takes that, and all else is refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import BatchStream, Cursor, DataError, Manifest, ReadOptions, Schema
from tests.data.reference import hashed_row, seed_of

SCHEMA = Schema.model_validate(
    {
        "dense": [{"name": "price"}, {"name": "added", "default": 2.5}],
        "sparse": [
            {"name": "row"},
            {"name": "user", "mapping": {"kind": "hash"}},
            {"name": "city", "mapping": {"kind": "hash"}},
            {"name": "tags", "kind": "id_list", "mapping": {"kind": "hash"}},
            {"name": "late", "on_null": "empty", "kind": "id_list", "mapping": {"kind": "hash"}},
            {"name": "other", "default": 7, "mapping": {"kind": "hash"}},
        ],
    }
)
ROWS_OF = dict.fromkeys(SCHEMA.sparse_names, 1000)


def write(path: Path, first: int, **kinds: pa.DataType) -> pa.Table:
    """Ten rows, of which the columns may have other types; None leaves one out."""
    rows = range(first, first + 10)
    columns: dict[str, Any] = {
        "label": pa.array([row % 2 for row in rows]),
        "row": pa.array(rows),
        "price": pa.array([row / 4 for row in rows]),
        "added": pa.array([float(row) for row in rows]),
        "user": pa.array([3 * row for row in rows]),
        "city": pa.array([f"city {row % 3}" for row in rows]),
        "tags": pa.array([[f"tag {row % 4}"] * (row % 3) for row in rows]),
        "late": pa.array([[row, row + 1] for row in rows]),
        "other": pa.array([row % 5 for row in rows]),
    }
    columns = {name: array.cast(kinds.get(name, array.type)) for name, array in columns.items() if kinds.get(name, 1)}
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path)
    return pa.table(columns)


def read(paths: list[Path]) -> dict[int, tuple[list[float], dict[str, list[int]]]]:
    """By row: its dense values, and its ids by feature."""
    manifest, found = Manifest.read([str(path) for path in paths], SCHEMA, window_rows=15), {}
    how: dict[str, Any] = {"rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0}
    with BatchStream(manifest, SCHEMA, ROWS_OF, batch_rows=7, options=ReadOptions(reader="local"), **how) as stream:
        for batch, _ in stream:
            ids = {name: batch.sparse[name].to_dense() for name in SCHEMA.sparse_names}
            for place in range(batch.rows):
                mine = {name: [int(one) for one in rows[place]] for name, rows in ids.items()}
                found[mine["row"][0]] = (batch.dense[place].tolist(), mine)
    return found


NARROW = {
    "label": pa.int8(),
    "price": pa.float32(),
    "user": pa.int16(),
    "city": pa.dictionary(pa.int32(), pa.string()),
    "tags": pa.large_list(pa.large_string()),
    "late": pa.list_(pa.uint8()),
    "other": pa.int32(),
}


@pytest.mark.parametrize("narrow_first", [True, False])
def test_narrower_types_and_other_layouts_give_the_same_ids_and_numbers(tmp_path: Path, narrow_first: bool) -> None:
    write(tmp_path / "same" / "a.parquet", 0)
    write(tmp_path / "same" / "b.parquet", 10)
    for name, first in (("a", 0), ("b", 10)):
        write(tmp_path / "mixed" / f"{name}.parquet", first, **(NARROW if narrow_first == (name == "a") else {}))
    wanted, found = read([tmp_path / "same"]), read([tmp_path / "mixed"])
    assert found == wanted and len(found) == 20


def test_a_column_that_some_files_lack_is_null_where_the_schema_takes_that(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0, added=None, late=None, other=None)
    write(tmp_path / "b.parquet", 10)
    found = read([tmp_path])
    whole = read([tmp_path / "b.parquet"])
    assert {row: found[row] for row in range(10, 20)} == whole
    default = [hashed_row(7, seed_of(0), 1000)]
    for row in range(10):
        dense, ids = found[row]
        assert dense == [row / 4, 2.5] and (ids["late"], ids["other"]) == ([], default)


def test_a_column_that_some_files_may_not_lack_is_refused_with_their_names(tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", 0)
    for number in range(7):
        write(tmp_path / f"b{number}.parquet", 10, user=None)
    with pytest.raises(
        DataError, match=r"'user' is missing in 7 of 8 files: .*b0.parquet, .*b4.parquet and 2 more"
    ) as e:
        read([tmp_path])
    assert (e.value.column, Path(e.value.file or "").name) == ("user", "b0.parquet")
    for name in ("a", *(f"b{number}" for number in range(7))):
        write(tmp_path / f"{name}.parquet", 0, added=None)
    with pytest.raises(DataError, match="column 'added' is missing; the file has"):
        read([tmp_path])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"user": pa.int64()}, {"user": pa.string()}),
        ({"other": pa.uint64()}, {"other": pa.int8()}),
    ],
)
def test_types_that_none_holds_together_are_refused_with_both_files(tmp_path: Path, one: Any, other: Any) -> None:
    write(tmp_path / "a.parquet", 0, **one)
    write(tmp_path / "b.parquet", 10, **other)
    with pytest.raises(
        DataError, match=r"the column's type differs between files: .* here, .* in .*a\.parquet"
    ) as caught:
        read([tmp_path])
    assert Path(caught.value.file or "").name == "b.parquet"


def test_a_column_whose_name_differs_in_case_is_not_taken_for_one_that_is_missing(tmp_path: Path) -> None:
    """Its values would be null without a word."""
    write(tmp_path / "a.parquet", 0)
    renamed = pq.read_table(tmp_path / "a.parquet")
    pq.write_table(renamed.rename_columns({"late": "Late"}), tmp_path / "b.parquet")
    with pytest.raises(
        DataError, match=r"column 'late' is missing in 1 of 2 files: .*b\.parquet; did you mean 'Late'\?"
    ):
        Manifest.read(str(tmp_path), SCHEMA)
