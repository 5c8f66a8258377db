"""Rows of tables whose files are not all of it (deletions, renamed and promoted columns): as the library's own scan."""

from __future__ import annotations

import json
import random
import struct
import uuid
import zlib
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import (
    BatchStream,
    Cursor,
    DataError,
    DataSet,
    Manifest,
    Mix,
    MixedStream,
    ReadOptions,
    Schema,
    WeightedDataSet,
)
from rayrec.data import Mapping as RowMapping
from tests.data.sets import table
from tests.data.test_kills import run
from tests.data.test_lake import iceberg  # noqa: F401  (a fixture)

deltalake = pytest.importorskip("deltalake")
pyiceberg_types = pytest.importorskip("pyiceberg.types")
pyroaring = pytest.importorskip("pyroaring")

SCHEMA = Schema.model_validate({"dense": [{"name": "x", "default": -1.0}], "sparse": [{"name": "id"}]})
Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"


def vector(rows: list[int]) -> dict[str, Any]:
    """A deletion vector in the log, by Delta's protocol: a 64-bit roaring bitmap in Z85."""
    raw = struct.pack("<iqI", 1681511377, 1, 0) + pyroaring.BitMap(rows).serialize()
    text = ""
    for word in struct.iter_unpack(">I", raw + bytes(-len(raw) % 4)):
        digits = [Z85[word[0] // 85**power % 85] for power in range(4, -1, -1)]
        text += "".join(digits)
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(raw), "cardinality": len(rows)}


def commit(path: Path, *actions: dict[str, Any]) -> None:
    log = path / "_delta_log"
    (log / f"{len([*log.glob('*.json')]):020}.json").write_text("\n".join(map(json.dumps, actions)))


def logged(path: Path, kind: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for file in sorted(path.glob("_delta_log/*.json")) for line in file.open()]
    return [line[kind] for line in lines if kind in line]


def delete_by_vectors(path: Path, deleted: list[list[int]]) -> None:
    """A version whose files, in the order in which they were written, lack these rows."""
    actions = []
    for add, rows in zip(logged(path, "add"), deleted, strict=True):
        if rows:
            gone = {"path": add["path"], "deletionTimestamp": 1, "dataChange": True, "partitionValues": {}}
            actions += [{"remove": gone}, {"add": {**add, "deletionVector": vector(rows)}}]
    commit(path, *actions)


def scanned(path: Path) -> pa.Table:
    """The rows as Delta's own query engine reads them."""
    found = deltalake.QueryBuilder().register("t", deltalake.DeltaTable(str(path))).execute("select * from t")
    return pa.table(found.read_all())


def read(data: DataSet, stops: list[tuple[int, int]], schema: Schema = SCHEMA) -> list[tuple[float, int]]:
    """The rows of an epoch, `(x, id)`: each (world, steps) is stopped after so many steps of every rank."""
    manifest, found = Manifest.of(data, schema, window_rows=16), list[tuple[float, int]]()
    cursor = Cursor.start(3)
    for world, steps in [*stops, (2, 10**9)]:
        after = []
        for rank in range(world):
            where = {"rank": rank, "world_size": world, "cursor": cursor, "seed": 1, "interleave": 2}
            options = ReadOptions(reader="local")
            with BatchStream(manifest, schema, {"id": 10_000}, batch_rows=5, options=options, **where) as stream:
                states = [stream.start_cursor]
                for _, (batch, state) in zip(range(steps), stream, strict=False):
                    found += zip(batch.dense[:, 0].tolist(), batch.sparse["id"].values().tolist(), strict=True)
                    states.append(state)
                after.append(states[-1])
        cursor = Cursor.merge(after)
    assert cursor.over
    return sorted(found)


def as_pairs(table: pa.Table, x: str = "x", key: str = "id") -> list[tuple[float, int]]:
    """What a library's scan gives, a null number as the schema's default."""
    numbers = table[x].cast(pa.float64()).fill_null(-1.0).to_pylist()
    return sorted(zip(numbers, table[key].to_pylist(), strict=True))


def numbered(first: int, rows: int) -> pa.Table:
    return pa.table({"label": [n % 2 for n in range(rows)], "x": np.arange(rows) / 2, "id": range(first, first + rows)})


@pytest.mark.parametrize("drawn", range(4))
def test_rows_that_deletion_vectors_delete_are_not_read_through_stops_and_resizes(tmp_path: Path, drawn: int) -> None:
    rng, path = random.Random(drawn), tmp_path / "clicks"
    sizes = [rng.randrange(20, 120) for _ in range(3)]
    for number, rows in enumerate(sizes):
        kept = {"configuration": {"delta.enableDeletionVectors": "true"}} if number == 0 else {"mode": "append"}
        deltalake.write_deltalake(str(path), numbered(1000 * number, rows), **kept)
    deleted = [sorted(rng.sample(range(rows), rng.choice([0, 1, rows // 3, rows]))) for rows in sizes]
    deleted[drawn % 3] = [0, sizes[drawn % 3] - 1]
    delete_by_vectors(path, deleted)
    wanted = as_pairs(scanned(path))
    assert len(wanted) == sum(sizes) - sum(map(len, deleted))
    data = DataSet(path=str(path), table="delta")
    stops = [(rng.randrange(1, 4), rng.randrange(1, 3)) for _ in range(2)]
    assert read(data, stops) == wanted
    some = data.model_copy(update={"filters": [["id", ">=", 1000]]})
    assert read(some, stops) == [pair for pair in wanted if pair[1] >= 1000]
    before = data.model_copy(update={"version": 2})
    assert len(read(before, stops)) == sum(sizes), "an earlier version has them"
    fingerprints = {Manifest.of(one, SCHEMA).fingerprint for one in (data, before)}
    assert len(fingerprints) == 2


def test_a_mix_counts_the_rows_that_are_left(tmp_path: Path) -> None:
    path = tmp_path / "clicks"
    deltalake.write_deltalake(str(path), numbered(0, 40), configuration={"delta.enableDeletionVectors": "true"})
    delete_by_vectors(path, [list(range(30))])
    pq.write_table(numbered(100, 10), tmp_path / "more.parquet")
    sets = [WeightedDataSet(path=str(path), table="delta"), WeightedDataSet(path=str(tmp_path / "more.parquet"))]
    mix = Mix.of(sets, SCHEMA)
    assert mix.passing == (10, 10)
    how = {"batch_rows": 4, "rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0}
    with MixedStream(mix, SCHEMA, {"id": 200}, options=ReadOptions(reader="local"), **how) as stream:
        ids = [one for batch, _ in stream for one in batch.sparse["id"].values().tolist()]
    assert sorted(ids) == [*range(30, 40), *range(100, 110)]


def test_every_row_that_is_left_comes_once_though_ranks_are_killed(tmp_path: Path) -> None:
    """As `test_kills.py`, of a table with deletion vectors."""
    path = tmp_path / "data"
    for number in range(2):
        kept = {"configuration": {"delta.enableDeletionVectors": "true"}} if number == 0 else {"mode": "append"}
        deltalake.write_deltalake(str(path), table(3000, 3000 * number), **kept)
    delete_by_vectors(path, [list(range(0, 3000, 3)), [5, 2999]])
    how = {"order": {"interleave": 4}, "limits": {"window_rows": 40}, "filters": [], "table": "delta"}
    cursor, seen = Cursor.start(0), []
    for world in (2, 3):
        cursor, rows = run(tmp_path, cursor, world, how, 4)
        seen += rows
    assert 0 < len(seen) < 4000, "they were killed in the middle"
    cursor, rows = run(tmp_path, cursor, 1, how, None)
    assert sorted(seen + rows) == sorted(scanned(path)["row"].to_pylist())


def test_a_delta_table_whose_columns_were_renamed_is_read_by_their_new_names(tmp_path: Path) -> None:
    path = tmp_path / "clicks"
    deltalake.write_deltalake(str(path), numbered(0, 30), configuration={"delta.columnMapping.mode": "name"})
    data = DataSet(path=str(path), table="delta")
    assert read(data, [(2, 1)]) == as_pairs(numbered(0, 30))
    (metadata,) = logged(path, "metaData")
    names = {"x": "id", "id": "x"}  # each takes the name of the other
    fields = json.loads(metadata["schemaString"])
    fields["fields"] = [{**one, "name": names.get(one["name"], one["name"])} for one in fields["fields"]]
    commit(path, {"metaData": {**metadata, "schemaString": json.dumps(fields)}})
    other = Schema.model_validate({"dense": [{"name": "id"}], "sparse": [{"name": "x"}]})
    manifest = Manifest.of(data, other)
    options = {"rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0, "options": ReadOptions(reader="local")}
    with BatchStream(manifest, other, {"x": 30}, batch_rows=30, **options) as stream:
        ((batch, _),) = stream
    pairs = sorted(zip(batch.dense[:, 0].tolist(), batch.sparse["x"].values().tolist(), strict=True))
    assert pairs == as_pairs(scanned(path), "id", "x") == as_pairs(numbered(0, 30))


def delete_positions(table: Any, rows: dict[str, list[int]]) -> None:
    """A snapshot with a file of positions, as Spark and Flink write them; pyiceberg writes none."""
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _FastAppendFiles

    pairs = [(path, row) for path in sorted(rows) for row in rows[path]]
    where = f"{table.location()}/deletes-{len(table.snapshots())}.parquet"
    local = Path(where.removeprefix("file://"))
    pq.write_table(pa.table({"file_path": [path for path, _ in pairs], "pos": [row for _, row in pairs]}), local)
    facts = {"file_size_in_bytes": local.stat().st_size, "record_count": len(pairs)}
    task = next(iter(table.scan().plan_files()))
    file = DataFile.from_args(
        file_path=where,
        content=DataFileContent.POSITION_DELETES,
        file_format=FileFormat.PARQUET,
        partition=task.file.partition,
        **facts,
    )
    file.spec_id = table.spec().spec_id
    with table.transaction() as change:
        snapshot = _FastAppendFiles(Operation.APPEND, change, table.io)
        snapshot.append_data_file(file)
        snapshot.commit()


@pytest.fixture
def plain(iceberg: Any) -> Any:  # noqa: F811
    """A table without partitions, of which two files have 40 rows each."""
    from pyiceberg.catalog import load_catalog

    made = load_catalog("test").create_table("db.plain", numbered(0, 1).schema)
    made.append(numbered(0, 40))
    made.append(numbered(100, 40))
    return made


PLAIN = DataSet(path="iceberg://test/db.plain", table="iceberg")


def test_rows_that_lists_of_positions_delete_are_not_read(plain: Any) -> None:
    before = PLAIN.pinned()
    files = [task.file.file_path for task in plain.scan().plan_files()]
    delete_positions(plain, {files[0]: [0, 7, 39]})
    delete_positions(plain, {files[0]: [7, 8], files[1]: list(range(40))})
    wanted = as_pairs(plain.scan().to_arrow())
    assert len(wanted) == 36
    assert read(PLAIN, [(3, 1), (1, 2)]) == wanted
    assert len(read(before, [])) == 80, "an earlier snapshot has them"


def delete_by_puffin(table: Any, rows: dict[str, list[int]]) -> None:
    """A snapshot with one Puffin file of a deletion vector for each file, by the formats' published layout."""
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _FastAppendFiles

    where = f"{table.location()}/deletes-{len(table.snapshots())}.puffin"
    local, written, blobs = Path(where.removeprefix("file://")), b"PFA1", list[dict[str, Any]]()
    for path, positions in rows.items():
        by_key: dict[int, list[int]] = {}
        for position in positions:
            by_key.setdefault(position >> 32, []).append(position & 0xFFFFFFFF)
        bitmaps = [struct.pack("<I", key) + pyroaring.BitMap(low).serialize() for key, low in sorted(by_key.items())]
        vector = b"\xd1\xd3\x39\x64" + struct.pack("<q", len(bitmaps)) + b"".join(bitmaps)
        blob = struct.pack(">I", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector))
        facts = {"type": "deletion-vector-v1", "fields": [2147483546], "snapshot-id": -1, "sequence-number": -1}
        known = {"referenced-data-file": path, "cardinality": str(len(positions))}
        blobs.append({**facts, "offset": len(written), "length": len(blob), "properties": known})
        written += blob
    footer = json.dumps({"blobs": blobs, "properties": {}}).encode()
    local.write_bytes(written + b"PFA1" + footer + struct.pack("<i", len(footer)) + bytes(4) + b"PFA1")
    task = next(iter(table.scan().plan_files()))
    file = DataFile.from_args(
        file_path=where,
        content=DataFileContent.POSITION_DELETES,
        file_format=FileFormat.PUFFIN,
        partition=task.file.partition,
        file_size_in_bytes=local.stat().st_size,
        record_count=sum(map(len, rows.values())),
    )
    file.spec_id = table.spec().spec_id
    with table.transaction() as change:
        snapshot = _FastAppendFiles(Operation.APPEND, change, table.io)
        snapshot.append_data_file(file)
        snapshot.commit()


def test_rows_that_vectors_in_puffin_files_delete_are_not_read(plain: Any) -> None:
    before = PLAIN.pinned()
    files = [task.file.file_path for task in plain.scan().plan_files()]
    (first,) = (path for path in files if pq.read_table(path.removeprefix("file://"))["id"][0].as_py() == 0)
    (second,) = set(files) - {first}
    delete_by_puffin(plain, {first: [0, 7, 39], second: list(range(1, 40))})
    wanted = [(n / 2, n) for n in range(40) if n not in (0, 7, 39)] + [(0.0, 100)]
    assert read(PLAIN, [(3, 1), (1, 2)]) == as_pairs(plain.scan().to_arrow()) == sorted(wanted)
    delete_positions(plain, {first: [1]})
    assert read(PLAIN, [(2, 1)]) == sorted({*wanted} - {(0.5, 1)}), "beside a list of positions"
    assert len(read(before, [])) == 80, "an earlier snapshot has them"


def test_an_iceberg_table_whose_partitions_and_types_are_its_own(iceberg: Any) -> None:  # noqa: F811
    """Partitions that were added and removed between files; UUIDs, fixed, decimals, structs and lists."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.schema import Schema as IcebergSchema

    kinds = [
        ("label", pyiceberg_types.LongType()), ("id", pyiceberg_types.UUIDType()),
        ("day", pyiceberg_types.StringType()), ("code", pyiceberg_types.FixedType(2)),
        ("key", pyiceberg_types.DecimalType(20, 0)), ("x", pyiceberg_types.DecimalType(9, 2)),
        ("tags", pyiceberg_types.ListType(20, pyiceberg_types.LongType())), ("at", pyiceberg_types.TimestamptzType()),
    ]  # fmt: skip
    fields = [pyiceberg_types.NestedField(number, *kind) for number, kind in enumerate(kinds, 1)]
    made = load_catalog("test").create_table("db.odd", IcebergSchema(*fields))

    def append(number: int, day: str) -> None:
        row = {
            "label": number % 2, "id": uuid.UUID(int=number).bytes, "day": day, "code": b"ab",
            "key": Decimal(2**60 + number), "x": Decimal(number) / 4, "tags": [number] * number,
            "at": datetime(2024, 1, number, tzinfo=UTC),
        }  # fmt: skip
        made.append(pa.Table.from_pylist([row], made.schema().as_arrow()))

    append(1, "a")
    with made.update_spec() as spec:
        spec.add_identity("day")
    append(2, "b")
    with made.update_spec() as spec:
        spec.remove_field("day")
    append(3, "c")
    hashed = {"mapping": {"kind": "hash"}}
    sparse = [{"name": name, **hashed} for name in ("id", "day", "code", "key")]
    schema = Schema.model_validate(
        {
            "dense": [{"name": "x"}],
            "sparse": [*sparse, {"name": "tags", "kind": "id_list"}],
            "timestamp": {"column": "at"},
        }
    )
    data = DataSet(path="iceberg://test/db.odd", table="iceberg")
    sizes = dict.fromkeys(schema.sparse_names, 1 << 20)
    where = {"rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0, "options": ReadOptions(reader="local")}
    with BatchStream(Manifest.of(data, schema), schema, sizes, batch_rows=9, shuffle=False, **where) as stream:
        ((batch, _),) = stream
    plain = pa.table(
        {
            "label": [1, 0, 1], "id": [str(uuid.UUID(int=number)) for number in (1, 2, 3)], "day": ["a", "b", "c"],
            "code": [b"ab"] * 3, "key": [2**60 + number for number in (1, 2, 3)], "x": [0.25, 0.5, 0.75],
            "tags": [[1], [2, 2], [3, 3, 3]], "at": [datetime(2024, 1, number, tzinfo=UTC) for number in (1, 2, 3)],
        }
    )  # fmt: skip
    expected = RowMapping(schema, sizes).to_batch(plain)
    order, wanted = batch.time.argsort(), [1, 2, 3]
    assert batch.dense[order].tolist() == expected.dense.tolist()
    for name in ("id", "day", "code", "key"):
        assert batch.sparse[name].values()[order].tolist() == expected.sparse[name].values().tolist()
    assert batch.sparse["tags"].lengths()[order].tolist() == wanted
    some = data.model_copy(update={"filters": [["day", "in", ["b", "c"]]]})
    assert Manifest.of(some, schema).rows == 2


def test_lists_of_values_are_refused_by_name(plain: Any) -> None:
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _FastAppendFiles

    task = next(iter(plain.scan().plan_files()))
    facts = {"file_size_in_bytes": 1, "record_count": 1, "partition": task.file.partition, "equality_ids": [3]}
    content = {"content": DataFileContent.EQUALITY_DELETES, "file_format": FileFormat.PARQUET}
    file = DataFile.from_args(file_path=f"{plain.location()}/other", **content, **facts)
    file.spec_id = plain.spec().spec_id
    with plain.transaction() as change:
        snapshot = _FastAppendFiles(Operation.APPEND, change, plain.io)
        snapshot.append_data_file(file)
        snapshot.commit()
    with pytest.raises(DataError, match=r"cannot be read by pyiceberg \(.*equality deletes.*rewrite_data_files"):
        read(PLAIN, [])


def test_iceberg_columns_are_read_by_their_numbers_whatever_they_are_called(plain: Any) -> None:
    """Renamed, swapped, promoted, added later, dropped and added again."""
    narrow = pa.schema([("label", pa.int64()), ("small", pa.int32()), ("x", pa.float32()), ("id", pa.int32())])
    from pyiceberg.catalog import load_catalog

    made = load_catalog("test").create_table("db.moved", narrow)
    made.append(pa.table({"label": [0, 1], "small": [5, 6], "x": [0.5, 1.5], "id": [1, 2]}, schema=narrow))
    for name, other in (("small", "kept"), ("id", "small"), ("kept", "id")):
        with made.update_schema() as change:
            change.rename_column(name, other)
    data = DataSet(path="iceberg://test/db.moved", table="iceberg")
    assert read(data, []) == as_pairs(made.scan().to_arrow()) == [(0.5, 5), (1.5, 6)], "nothing was written since"
    before = data.model_copy(update={"version": made.current_snapshot().snapshot_id})
    assert read(before, []) == [(0.5, 1), (1.5, 2)], "a run that pinned it before keeps its columns"
    with pytest.raises(
        DataError, match=rf"column 'id' .* another one than in its newest .* set version: {before.version}"
    ):
        data.pinned()
    with made.update_schema() as change:
        change.update_column("id", pyiceberg_types.LongType())
        change.update_column("x", pyiceberg_types.DoubleType())
    made.append(pa.table({"label": [1], "id": [1 << 13], "x": [2.5], "small": pa.array([3], pa.int32())}))
    assert read(before, []) == [(0.5, 1), (1.5, 2)], (
        "a version that is not the newest has the names that it was written with"
    )
    assert read(data, [(2, 1)]) == as_pairs(made.scan().to_arrow()) == [(0.5, 5), (1.5, 6), (2.5, 8192)]
    assert read(data.pinned(), []) == [(0.5, 5), (1.5, 6), (2.5, 8192)]
    some = data.model_copy(update={"filters": [["id", ">", 5]]})
    assert read(some, []) == [(1.5, 6), (2.5, 8192)], "not by the statistics of another column"
    with made.update_schema() as change:
        change.delete_column("x")
    with made.update_schema() as change:
        change.add_column("x", pyiceberg_types.DoubleType())
    made.append(pa.table({"label": [1], "id": [9], "small": pa.array([3], pa.int32()), "x": [7.5]}))
    assert read(data, [(1, 1)]) == as_pairs(made.scan().to_arrow()) == [(-1.0, 5), (-1.0, 6), (-1.0, 8192), (7.5, 9)]
    with pytest.raises(DataError, match="the table has no column 'kept' at this version"):
        read(data, [], Schema.model_validate({"sparse": [{"name": "kept"}]}))
    strict = Schema.model_validate({"dense": [{"name": "x"}], "sparse": [{"name": "id"}]})
    with pytest.raises(DataError, match="column 'x' is missing in 2 of 3 files"):
        read(data, [], strict)
    assert RowMapping(SCHEMA, {"id": 9}).to_batch({"label": [0], "x": [None], "id": [1]}).dense.tolist() == [[-1.0]]
