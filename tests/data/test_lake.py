"""Tables of Delta Lake and Iceberg as data sets: their rows at a version, which a run keeps to."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import BatchStream, Cursor, DataError, DataSet, Manifest, ReadOptions, Schema, write_index
from rayrec.train import Trainer, parse_config
from tests.train import small

deltalake = pytest.importorskip("deltalake")
pyiceberg_types = pytest.importorskip("pyiceberg.types")

SCHEMA = Schema.model_validate(
    {"dense": [{"name": "x"}], "sparse": [{"name": "day", "mapping": {"kind": "hash"}}, {"name": "id"}]}
)


def rows(*ids: int) -> pa.Table:
    days = [["a b", "c/d", None][one % 3] for one in ids]
    return pa.table({"label": [one % 2 for one in ids], "x": [float(one) for one in ids], "day": days, "id": [*ids]})


def ids_of(data: DataSet, filters: Any = ()) -> list[int]:
    schema = SCHEMA.model_copy(
        update={"sparse": tuple(one.model_copy(update={"on_null": "empty"}) for one in SCHEMA.sparse)}
    )
    data = data.model_copy(update={"filters": filters})
    manifest, found = Manifest.of(data, schema), []
    options = ReadOptions(reader="local")
    where = {"batch_rows": 4, "rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0, "options": options}
    with BatchStream(manifest, schema, {"day": 100, "id": 100}, **where) as stream:
        for batch, _ in stream:
            found += batch.sparse["id"].values().tolist()
    return sorted(found)


@pytest.fixture
def delta(tmp_path: Path) -> Path:
    """Versions: 0 with ids 0 to 5; 1 with 6 and 7 too; 2 without 3, by rewriting a file."""
    path = tmp_path / "clicks"
    deltalake.write_deltalake(str(path), rows(*range(6)), partition_by=["day"])
    deltalake.write_deltalake(str(path), rows(6, 7), mode="append")
    deltalake.DeltaTable(str(path)).delete("id = 3")
    return path


def test_a_delta_table_is_read_at_a_version(delta: Path) -> None:
    wanted = {0: [*range(6)], 1: [*range(8)], 2: [0, 1, 2, 4, 5, 6, 7], None: [0, 1, 2, 4, 5, 6, 7]}
    for version, ids in wanted.items():
        assert ids_of(DataSet(path=str(delta), table="delta", version=version)) == ids
    newest = DataSet(path=str(delta), table="delta").pinned()
    assert newest.version == 2 and "at version 2" in str(newest)
    assert ids_of(newest, [["day", "=", "c/d"]]) == [1, 4, 7]
    assert ids_of(DataSet(path=f"{delta}/**/*.parquet")) != ids_of(newest), "files of all versions are there"
    with pytest.raises(DataError, match=r"holds a table in Delta format, .* set data.train.table: delta"):
        ids_of(DataSet(path=str(delta)))
    with pytest.raises(DataError, match="cannot open the Delta table at version 9"):
        ids_of(DataSet(path=str(delta), table="delta", version=9))
    with pytest.raises(DataError, match=r"cannot open .*nowhere"):
        ids_of(DataSet(path=str(delta.parent / "nowhere"), table="delta"))


def test_a_delta_table_declares_the_types_of_its_partitions(tmp_path: Path) -> None:
    stores = {"store": ["001", "1", "02"], "shop": [7, 10, None], "day": [date(2024, 1, day) for day in (1, 2, 3)]}
    table = pa.table({"label": [0, 1, 0], "x": [0.5, 1.5, 2.5]} | stores)
    deltalake.write_deltalake(str(tmp_path / "a"), table, partition_by=[*stores])
    features = [{"name": name, "mapping": {"kind": "hash"}, "on_null": "empty"} for name in stores]
    schema = Schema.model_validate({"dense": [{"name": "x"}], "sparse": features})
    data = DataSet(path=str(tmp_path / "a"), table="delta")
    manifest = Manifest.of(data, schema)
    kinds = dict(manifest.columns)
    assert [kinds[name] for name in stores] == [pa.string(), pa.int64(), pa.string()]
    found = sorted(dict(file.partition)["store"] for file in manifest.files.take(np.arange(3)))
    assert found == ["001", "02", "1"]
    some = data.model_copy(update={"filters": [["store", "=", "1"]]})
    assert Manifest.of(some, schema).rows == Manifest.of(data, schema).only(("store", "1")).rows == 1
    deltalake.write_deltalake(str(tmp_path / "b"), table.slice(2), partition_by=["shop"])
    nulls = Schema.model_validate({"dense": [{"name": "x"}], "sparse": [features[1]]})
    manifest = Manifest.of(DataSet(path=str(tmp_path / "b"), table="delta"), nulls)
    assert dict(manifest.columns)["shop"] == pa.int64(), "also where all values are null"


def test_delta_tables_as_their_writers_leave_them(tmp_path: Path) -> None:
    """Columns added later, narrower integers, a log that begins with a checkpoint, another schema, and no rows."""
    path, data = tmp_path / "a", DataSet(path=str(tmp_path / "a"), table="delta")
    deltalake.write_deltalake(str(path), rows(1, 2).drop_columns(["x"]))
    small = rows(3).set_column(3, "id", pa.array([3], pa.int8()))
    deltalake.write_deltalake(str(path), small, mode="append", schema_mode="merge")
    deltalake.DeltaTable(str(path)).create_checkpoint()
    (path / "_delta_log" / f"{0:020}.json").unlink()
    schema = Schema.model_validate({"dense": [{"name": "x", "default": -1.0}], "sparse": [{"name": "id"}]})
    where = {"rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0, "options": ReadOptions(reader="local")}
    with BatchStream(Manifest.of(data, schema), schema, {"id": 10}, batch_rows=10, **where) as stream:
        ((batch, _),) = stream
    pairs = zip(batch.sparse["id"].values().tolist(), batch.dense[:, 0].tolist(), strict=True)
    assert sorted(pairs) == [(1, -1.0), (2, -1.0), (3, 3.0)]
    texts = pa.table({"label": [0], "id": ["a"]})
    deltalake.write_deltalake(str(path), texts, mode="overwrite", schema_mode="overwrite")
    hashed = Schema.model_validate({"sparse": [{"name": "id", "mapping": {"kind": "hash"}}]})
    assert dict(Manifest.of(data, hashed).columns)["id"] == pa.string()
    before = data.model_copy(update={"version": 1})
    assert dict(Manifest.of(before, hashed).columns)["id"] == pa.int64()
    deltalake.DeltaTable(str(path)).delete()
    with pytest.raises(DataError, match="this version of the table has no files"):
        Manifest.of(data, hashed)
    deltalake.write_deltalake(str(tmp_path / "b"), rows(1).slice(1))
    with pytest.raises(DataError, match=r"a table in Delta format, and no file .* data.train.table: delta"):
        Manifest.of(DataSet(path=str(tmp_path / "b")), hashed)


def commit(delta: Path, **more: Any) -> None:
    """Writes a version by hand: one file again, with other facts."""
    log = delta / "_delta_log"
    version = len([*log.glob("*.json")])
    file = next(delta.rglob("*.parquet"))
    features = {"readerFeatures": ["deletionVectors"], "writerFeatures": ["deletionVectors"]}
    add = {"path": f"new/{file.name}", "size": 1, "partitionValues": {"day": "a b"}, "modificationTime": 1}
    actions = [{"protocol": {"minReaderVersion": 3, "minWriterVersion": 7} | features}]
    actions.append({"add": add | {"dataChange": True} | more})
    (log / f"{version:020}.json").write_text("\n".join(map(json.dumps, actions)))


def test_delta_tables_that_are_more_than_their_files_are_refused_by_name(delta: Path) -> None:
    deltalake.write_deltalake(str(delta), rows(8), mode="append")
    commit(delta)
    with pytest.raises(DataError, match=r"version 4 of the table has .* outside a folder day="):
        ids_of(DataSet(path=str(delta), table="delta"))
    vector = {"storageType": "u", "pathOrInlineDv": "vBn[lx{q8@P<9BNH/isA", "offset": 1, "sizeInBytes": 36}
    commit(delta, deletionVector=vector | {"cardinality": 2})
    with pytest.raises(DataError, match="version 5 of the table has deletion vectors that cannot be read"):
        ids_of(DataSet(path=str(delta), table="delta"))
    assert ids_of(DataSet(path=str(delta), table="delta", version=3)) == [0, 1, 2, 4, 5, 6, 7, 8]


@pytest.fixture
def iceberg(tmp_path: Path, catalogs: Callable[..., None]) -> Any:
    """A table of a catalog in a file, snapshots as `delta`'s versions."""
    import pyiceberg.catalog

    catalogs(TEST__URI=f"sqlite:///{tmp_path}/catalog.db", TEST__WAREHOUSE=f"file://{tmp_path}/warehouse")
    catalog = pyiceberg.catalog.load_catalog("test")
    catalog.create_namespace("db")
    table = catalog.create_table("db.clicks", rows(0).schema)
    with table.update_spec() as spec:
        spec.add_identity("day")
    table.append(rows(*range(6)))
    table.append(rows(6, 7))
    table.delete("id == 3")
    yield table
    catalog.close()


def test_an_iceberg_table_is_read_at_a_snapshot(iceberg: Any) -> None:
    path, schema = "iceberg://test/db.clicks", SCHEMA
    by_length = {iceberg.scan(snapshot_id=one.snapshot_id).count(): one.snapshot_id for one in iceberg.snapshots()}
    wanted = {6: [*range(6)], 8: [*range(8)], 7: [0, 1, 2, 4, 5, 6, 7]}
    for length, ids in wanted.items():
        for where in (path, iceberg.metadata_location):
            assert ids_of(DataSet(path=where, table="iceberg", version=by_length[length])) == ids
    newest = DataSet(path=path, table="iceberg").pinned()
    assert newest.version == by_length[7]
    for inner in ("", "/data", "/data/day=c%2Fd"):
        with pytest.raises(DataError, match=r"holds a table in Iceberg format, .* set data.train.table: iceberg"):
            ids_of(DataSet(path=iceberg.location().removeprefix("file://") + inner))
    assert ids_of(newest, [["day", "=", "c/d"]]) == [1, 4, 7], "the column of the files, not of their folders"
    with pytest.raises(DataError, match=r"no snapshot 9; its last ones are \d"):
        Manifest.of(DataSet(path=path, table="iceberg", version=9), schema)
    with pytest.raises(DataError, match="cannot open"):
        Manifest.of(DataSet(path="iceberg://test/db.nowhere", table="iceberg"), schema)


def test_iceberg_tables_that_are_more_than_their_files_are_refused_by_name(
    iceberg: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A snapshot with a file of ORC, as other writers make them."""
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _FastAppendFiles

    def add(**facts: Any) -> None:
        task = next(iter(iceberg.scan().plan_files()))
        facts = {"file_size_in_bytes": 1, "record_count": 1, "partition": task.file.partition} | facts
        file = DataFile.from_args(file_path=f"{iceberg.location()}/other", **facts)
        file.spec_id = iceberg.spec().spec_id
        with iceberg.transaction() as change:
            snapshot = _FastAppendFiles(Operation.APPEND, change, iceberg.io)
            snapshot.append_data_file(file)
            snapshot.commit()

    add(content=DataFileContent.DATA, file_format=FileFormat.ORC)
    with pytest.raises(DataError, match=r"has ORC files, e.g. file://.*/other"):
        ids_of(DataSet(path="iceberg://test/db.clicks", table="iceberg"))


def test_a_migrated_file_that_lacks_its_partition_column_is_refused(iceberg: Any, tmp_path: Path) -> None:
    """As in a table migrated from Hive: the value of the column is in the metadata alone."""
    from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
    from pyiceberg.table.snapshots import Operation
    from pyiceberg.table.update.snapshot import _FastAppendFiles

    (tmp_path / "day=c%2Fd").mkdir()
    path = tmp_path / "day=c%2Fd" / "0.parquet"
    pq.write_table(rows(10).drop_columns(["day"]), path)
    partition = next(task.file.partition for task in iceberg.scan().plan_files() if task.file.partition[0] == "c/d")
    facts = {"file_size_in_bytes": path.stat().st_size, "record_count": 1, "partition": partition}
    file = DataFile.from_args(
        file_path=f"file://{path}", content=DataFileContent.DATA, file_format=FileFormat.PARQUET, **facts
    )
    file.spec_id = iceberg.spec().spec_id
    with iceberg.transaction() as change:
        snapshot = _FastAppendFiles(Operation.APPEND, change, iceberg.io)
        snapshot.append_data_file(file)
        snapshot.commit()
    with pytest.raises(
        DataError, match="lacks the partition column 'day', whose value is only in the metadata"
    ) as caught:
        ids_of(DataSet(path="iceberg://test/db.clicks", table="iceberg"))
    assert caught.value.file == str(path)
    others = Schema.model_validate({"dense": [{"name": "x"}], "sparse": [{"name": "id"}]})
    assert Manifest.of(DataSet(path="iceberg://test/db.clicks", table="iceberg"), others).num_files > 1


def test_a_run_keeps_to_the_version_that_it_began_with(tmp_path: Path) -> None:
    small.write(tmp_path / "train", 200)
    small.write(tmp_path / "eval", 50, seed=1)
    path = tmp_path / "table"
    table = pq.read_table(tmp_path / "train")
    deltalake.write_deltalake(str(path), table)
    raw = small.raw_config(tmp_path, trainer__epochs=1, name="pinned")
    raw["data"]["train"] = {"path": str(path), "table": "delta"}
    assert Trainer(parse_config(raw)).fit().train["samples"] == 200
    deltalake.write_deltalake(str(path), table.slice(0, 50), mode="append")
    raw["trainer"]["epochs"] = 2
    result = Trainer(parse_config(raw)).fit()
    assert result.train["samples"] == 400, "the second epoch reads what the first one read"
    assert "version: 0" in result.folder.joinpath("config.yaml").read_text()
    again = Trainer(parse_config(raw | {"name": "new"})).fit()
    assert "version: 1" in again.folder.joinpath("config.yaml").read_text() and again.train["samples"] == 500


def test_the_credentials_of_a_catalog_are_not_told(catalogs: Callable[..., None]) -> None:
    catalogs(WRONG__URI="oracle://reader:s3cret@host/db")
    with pytest.raises(DataError, match=r"cannot open .* oracle://\*\*\*@host") as caught:
        Manifest.of(DataSet(path="iceberg://wrong/db.clicks", table="iceberg"), SCHEMA)
    assert "s3cret" not in str(caught.value)


def test_the_footers_of_a_table_are_kept_for_the_next_launch(delta: Path, tmp_path: Path, opened: list[str]) -> None:
    out = tmp_path / "index.arrow"
    done = write_index([str(delta)], str(out), table="delta")
    assert (done.files, done.rows) == (len(DataSet(path=str(delta), table="delta").listed().files), 7)
    with pytest.raises(DataError, match="a table has no folder for the index"):
        write_index([str(delta)], table="delta")
    opened.clear()
    assert ids_of(DataSet(path=str(delta), table="delta", index=str(out))) == [0, 1, 2, 4, 5, 6, 7] and not opened


def test_what_is_no_table_is_said_when_the_config_is_read() -> None:
    for given, message in (
        ({"path": "x", "version": 3}, "needs table: delta or table: iceberg"),
        ({"path": ["x", "y"], "table": "delta"}, "a delta table is one path"),
        ({"path": "s3://key:secret@bucket/x", "table": "delta"}, "was given with credentials"),
    ):
        with pytest.raises(ValueError, match=message):
            DataSet.model_validate(given)
