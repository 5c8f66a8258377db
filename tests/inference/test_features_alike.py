"""A feature has one value, whoever computes it: the stream that trains, a prediction job, a service, the export."""

from __future__ import annotations

import io
import json
import re
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from rayrec import Batch
from rayrec.data import BadRows, BatchStream, Cursor, DataError, DataSet, Manifest, ReadOptions
from rayrec.inference import Model, Scorer
from rayrec.inference.predict import predict
from rayrec.serve import ARROW, JSON, Limits, RequestError
from rayrec.serve.requests import Reader
from rayrec.train import Display, Trainer, export_run, load_config, parse_config
from tests.data.test_derived import ALL, ROWS_OF, drawn_rows, table_of

ROWS, AT_ONCE = 30_000, 5000
FITTED = {"name": "fifths", "kind": "buckets", "column": "x", "boundaries": [-2.0, -0.5, 0.5, 2.0], "quantiles": 5}
LATE = {"name": "late", "kind": "age", "column": "before", "at": "at", "on_future": "error"}


def written(folder: Path, rows: list[dict[str, Any]], files: int = 1) -> Path:
    """The rows with labels, in files one after the other."""
    folder.mkdir(parents=True)
    table = table_of(rows)
    table = table.append_column("label", pa.array(np.arange(len(rows)) % 2))
    size = -(-len(rows) // files)
    for number in range(files):
        part = table.slice(number * size, size)
        pq.write_table(part, folder / f"{number}.parquet", row_group_size=7000)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One whose features are all kinds of derived columns."""
    folder = tmp_path_factory.mktemp("features")
    written(folder / "train", [in_time(row) for row in drawn_rows(1, 3000)])
    derived = [*ALL["derived"], FITTED, LATE]
    scaled = {"name": "x", "default": 0.5, "transforms": [{"kind": "standardize", "mean": 1.0, "std": 3.0}]}
    dense = [*ALL["dense"], scaled, {"name": "late", "default": 0.0}]
    sparse = [*ALL["sparse"], {"name": "fifths", "on_null": "empty"}]
    raw = {
        "name": "features",
        "data": {"train": str(folder / "train"), "eval": str(folder / "train")},
        "schema": {"derived": derived, "dense": dense, "sparse": sparse},
        "tables": [
            {"name": one["name"], "rows": ROWS_OF.get(one["name"], 5), "dim": 4, "features": [one["name"]]}
            for one in sparse
        ],
        "model": {"name": "dlrm", "args": {"dense_arch": [8, 4], "over_arch": [8, 1]}},
        "trainer": {"num_workers": 0, "batch_size": 500, "epochs": 1},
        "storage": {"path": str(folder / "runs")},
    }
    return Trainer(parse_config(raw), display=Display(Console(file=io.StringIO()))).fit().folder


@pytest.fixture(scope="module")
def model(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(run, tmp_path_factory.mktemp("out") / "model").folder


def stream_of(run: Path, data: Path, rows: int = AT_ONCE) -> BatchStream:
    """What the run would train on, of these files, in their order."""
    config = load_config(run / "config.yaml")
    schema = config.data_schema.for_training
    rows_of = {feature: table.rows for table in config.tables for feature in table.features}
    options = ReadOptions(reader="local", bad_rows=BadRows(policy="skip", limit=2000, samples=2000))
    where = {"rank": 0, "world_size": 1, "cursor": Cursor.start(0), "seed": 0, "shuffle": False, "options": options}
    manifest = Manifest.of(DataSet(path=str(data)), schema)
    return BatchStream(manifest, schema, rows_of, batch_rows=rows, **where)


def assert_same(one: Batch, other: Batch) -> None:
    assert one.dense.equal(other.dense) and one.sparse.keys() == other.sparse.keys()
    for part in ("lengths", "values", "weights"):
        assert getattr(one.sparse, part)().equal(getattr(other.sparse, part)()), part


def as_json(rows: list[dict[str, Any]]) -> bytes:
    return json.dumps({"rows": rows}, default=datetime.isoformat).encode()


def as_arrow(rows: list[dict[str, Any]]) -> bytes:
    sink, table = pa.BufferOutputStream(), table_of(rows)
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue().to_pybytes()


def in_time(row: dict[str, Any]) -> dict[str, Any]:
    """No event after the row's time."""
    late = row["at"] is not None and row["before"] is not None and row["before"] > row["at"]
    return {**row, "at": row["before"], "before": row["at"]} if late else row


def test_values_are_equal_in_training_prediction_service_and_export(run: Path, model: Path, tmp_path: Path) -> None:
    rows = [in_time(row) for row in drawn_rows(7, ROWS)]
    data = written(tmp_path / "data", rows, files=3)
    with stream_of(run, data) as stream:
        trained = [batch for batch, _ in stream]
    assert sum(batch.rows for batch in trained) == ROWS
    exported = Model(model)
    scorer = Scorer(exported)  # what a prediction job maps with
    reader = Reader(scorer.mapping, scorer.schema.sparse_names, Limits(body_bytes=1 << 30, ids=1 << 30))
    for number, batch in enumerate(trained):
        some = rows[number * AT_ONCE : number * AT_ONCE + batch.rows]
        for body, kind in ((as_json(some), JSON), (as_arrow(some), ARROW)):
            served, _ = reader.batch([reader.read(body, kind)])
            assert_same(batch, served)
        predicted, errors = scorer.mapping.to_batch_and_errors(table_of(some))
        assert not errors
        assert_same(batch, predicted)
    predict(model, str(data), tmp_path / "scores")
    found = pq.read_table(tmp_path / "scores")["prediction"].to_numpy()
    wanted = torch.cat([torch.sigmoid(exported.score(batch)) for batch in trained]).numpy()
    assert np.allclose(found, wanted, atol=1e-6)
    assert wanted.std() > 0, "the features matter"


def test_bad_values_are_named_alike(run: Path, model: Path, tmp_path: Path) -> None:
    """Events after their row's time: the same rows, by the same words."""
    rows = drawn_rows(9, 2000)
    late = [number for number, row in enumerate(rows) if in_time(row) != row]
    assert 300 < len(late) < 1000
    scorer = Scorer(Model(model))
    errors = scorer.score(table_of(rows)).errors
    assert sorted(errors) == late and {one.column for one in errors.values()} == {"before"}
    (problem,) = {one.problem for one in errors.values()}
    assert problem == "derived column 'late': the event is later than the row's time"
    reader = Reader(scorer.mapping, scorer.schema.sparse_names, Limits(body_bytes=1 << 30))
    with pytest.raises(RequestError, match=re.escape(problem)) as caught:
        reader.batch([reader.read(as_json(rows), JSON)])
    assert caught.value.errors[0]["row"] == late[0]
    with stream_of(run, written(tmp_path / "data", rows), 64) as stream:
        kept = sum(batch.rows for batch, _ in stream)
    assert kept == len(rows) - len(late) and stream.skipped.count == len(late)
    assert {one.problem for one in stream.skipped.samples} == {problem}
    with pytest.raises(DataError, match=re.escape(problem)) as refused:
        predict(model, str(tmp_path / "data"), tmp_path / "scores")
    assert refused.value.row == late[0]
