"""From Parquet files to batches, every row once an epoch, on any number of ranks."""

import tempfile
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data import (
    BadRows,
    BatchStream,
    Condition,
    Cursor,
    DataError,
    DataSet,
    DenseFeature,
    Hash,
    Identity,
    Label,
    Layout,
    Manifest,
    ReadOptions,
    SampleWeight,
    Schema,
    SparseFeature,
    Standardize,
    TextOptions,
    WeightedDataSet,
    check,
    convert,
    count_column,
    data_sets,
    empty_batch,
    inspect,
    load_vocabulary,
    manifest_of,
    to_batch,
    write_index,
)

schema = Schema(
    label=Label(column="rating", at_least=4.0),
    sample_weight=SampleWeight(column="weight"),
    dense=[DenseFeature(name="age", transforms=[Standardize(mean=40.0, std=10.0)])],
    sparse=[
        SparseFeature(name="user", mapping=Hash(seed=1)),
        SparseFeature(name="genres", kind="id_list", mapping=Identity(bounds="drop")),
    ],
)
rows_of = {"user": 1000, "genres": 20}  # rows of the tables that the features look up
columns = {"user": ["ann", "bob"] * 8, "genres": [[1, 2], []] * 8, "age": [30.0, 50.0] * 8}
table = pa.table(columns | {"rating": [4.5, 2.0] * 8, "weight": [1.0, 0.5] * 8})

batch = to_batch(table, schema, rows_of)
assert batch.label[:2].tolist() == [1.0, 0.0] and batch.dense[:2, 0].tolist() == [-1.0, 1.0]
assert batch.sparse["genres"].lengths()[:2].tolist() == [2, 0]
assert empty_batch(schema).label.shape == (0,)
try:
    to_batch(table.drop_columns(["age"]), schema, rows_of)
except DataError as error:
    print(error)

with tempfile.TemporaryDirectory() as folder:
    pq.write_table(table, f"{folder}/part.parquet", row_group_size=4)
    manifest = manifest_of(DataSet(path=folder), schema)
    assert isinstance(manifest, Manifest) and manifest.rows == 16
    options = ReadOptions(reader="local", bad_rows=BadRows(policy="skip"))
    where = {"rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0}
    with BatchStream(manifest, schema, rows_of, batch_rows=4, **where, options=options) as stream:
        seen = sum(len(batch.label) for batch, cursor in stream)
    assert seen == 16
    mix = [WeightedDataSet(path=folder, weight=3), WeightedDataSet(path=folder, weight=1)]
    assert len(data_sets(mix)) == 2
    assert check(manifest, schema, rows_of).bad_rows == 0
    assert Condition.parse(["age", ">", 40.0]).holds(table["age"]).sum() == 8

# Before training: convert files, index their footers, count a vocabulary, propose a schema.
with tempfile.TemporaryDirectory() as folder:
    Path(folder, "log.csv").write_text("user;clicked\n" + "ann;1\nbob;0\n" * 8)
    text = TextOptions(separator=";", types={"user": "string"})
    (converted,) = convert(f"{folder}/log.csv", f"{folder}/rows", text=text, layout=Layout(row_group_rows=4))
    assert converted.rows == 16 and write_index([f"{folder}/rows"]).row_groups == 4
    count_column(f"{folder}/rows", "user", Path(folder, "users.parquet"))
    assert load_vocabulary(f"{folder}/users.parquet").find(pa.array(["bob", "eve"])).tolist() == [1, -1]
    assert inspect(f"{folder}/rows").proposal()["schema"]["label"] == {"column": "clicked"}
