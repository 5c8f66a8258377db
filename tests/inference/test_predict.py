"""Predictions on files: every row once with its columns, those of the service and the trainer, also after a SIGKILL."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.cli import run as cli
from rayrec.data import DataError
from rayrec.inference import Model, RetrieveOptions, write_index
from rayrec.inference.predict import predict
from rayrec.inference.retrieve import retrieve
from rayrec.train import export_run
from tests.inference.runs import TWO_LABELS, train, trainer_scores
from tests.s3 import s3_bucket
from tests.train import small


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train(tmp_path_factory.mktemp("run"), **TWO_LABELS)


@pytest.fixture(scope="module")
def model(run: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export_run(run, tmp_path_factory.mktemp("out") / "model").folder


def read(out: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(out.glob("part-*.parquet"))])


def test_every_row_is_there_once_with_its_columns_and_the_trainers_scores(
    run: Path, model: Path, tmp_path: Path
) -> None:
    data = run.parent.parent / "eval"
    done = predict(model, str(data), tmp_path / "out", rows_per_file=100)
    found = read(tmp_path / "out")
    source = pa.concat_tables([pq.read_table(path) for path in sorted(data.iterdir())])
    assert done.rows == 301 and done.parts == len(list((tmp_path / "out").glob("part-*.parquet"))) > 2
    assert found.select(source.column_names).equals(source)
    expected = torch.cat([logits for _, logits in trainer_scores(run)]).sigmoid().numpy()
    for column, name in enumerate(("prediction_click", "prediction_like")):
        np.testing.assert_allclose(found[name].to_numpy(), expected[:, column], rtol=0, atol=1e-6)


def test_a_second_call_does_only_what_is_missing(model: Path, run: Path, tmp_path: Path) -> None:
    data, out = str(run.parent.parent / "eval"), tmp_path / "out"
    predict(model, data, out, rows_per_file=100, columns=["row"])
    whole = read(out)
    parts = sorted(out.glob("part-*.parquet"))
    parts[1].unlink()
    (out / ".part-000001.parquet.1.2").write_bytes(b"half")
    kept = parts[0].stat().st_mtime_ns
    assert predict(model, data, out, rows_per_file=100, columns=["row"]).parts == 1
    assert parts[0].stat().st_mtime_ns == kept and read(out).equals(whole) and not list(out.glob(".part-*"))
    assert whole.column_names == ["row", "prediction_click", "prediction_like"]
    with pytest.raises(ValueError, match="another job"):
        predict(model, data, out, rows_per_file=50, columns=["row"])


def test_bad_rows_end_the_job_with_their_place_or_stay_without_prediction(model: Path, tmp_path: Path) -> None:
    table = small.table(50)
    users = table["user"].to_pylist()
    users[17], users[33] = 10_000, -1
    table = table.set_column(table.column_names.index("user"), "user", pa.array(users))
    pq.write_table(table.drop_columns(["label", "like"]), tmp_path / "rows.parquet", row_group_size=10)
    with pytest.raises(DataError, match=r"outside its table.*rows\.parquet, row group 1, row 17, column 'user'.*fix:"):
        predict(model, str(tmp_path / "rows.parquet"), tmp_path / "out")
    done = predict(model, str(tmp_path / "rows.parquet"), tmp_path / "skip", bad_rows="skip")
    assert sum(done.skipped.values()) == 2
    nulls = read(tmp_path / "skip")["prediction_click"].is_null().to_pylist()
    assert [row for row, null in enumerate(nulls) if null] == [17, 33]
    with pytest.raises(DataError, match="more than 1 rows"):
        predict(model, str(tmp_path / "rows.parquet"), tmp_path / "limit", bad_rows="skip", bad_rows_limit=1)


@pytest.fixture
def bucket() -> Iterator[str]:
    """Options of URIs in a bucket `scores` of a local S3 server."""
    with s3_bucket("scores") as options:
        yield options


def test_predictions_in_object_storage_are_those_of_a_folder_and_go_on_where_they_stopped(
    model: Path, run: Path, tmp_path: Path, bucket: str, capsys: pytest.CaptureFixture[str]
) -> None:
    data, uri = str(run.parent.parent / "eval"), f"s3://scores/of/eval{bucket}"
    predict(model, data, tmp_path / "out", rows_per_file=100)
    predict(model, data, uri, rows_per_file=100)
    filesystem, folder = pafs.FileSystem.from_uri(uri)

    def there() -> pa.Table:
        found = filesystem.get_file_info(pafs.FileSelector(folder))
        paths = sorted(info.path for info in found if info.base_name.startswith("part-"))
        return pa.concat_tables([pq.read_table(path, filesystem=filesystem) for path in paths])

    assert there().equals(read(tmp_path / "out"))
    filesystem.delete_file(f"{folder}/part-000001.parquet")
    assert predict(model, data, uri, rows_per_file=100).parts == 1
    assert there().equals(read(tmp_path / "out"))
    with pytest.raises(ValueError, match="another job"):
        predict(model, data, uri, rows_per_file=50)
    pafs.copy_files(str(model), f"{folder}/models/v1", destination_filesystem=filesystem)
    models = uri.replace("of/eval", "of/eval/models")
    assert cli(["predict", models, data, str(tmp_path / "far")]) == 0
    predict(model, data, tmp_path / "near")
    assert read(tmp_path / "far").equals(read(tmp_path / "near"))
    capsys.readouterr()
    away = "s3://scores/x?endpoint_override=127.0.0.1:1&scheme=http&region=us-east-1"
    for wrong in (away, str(model / "export.json")):
        assert cli(["predict", wrong, data, str(tmp_path / "none")]) == 1
        assert f"error: {wrong} cannot be read: " in capsys.readouterr().err
    with pytest.raises(ValueError, match=r"no-such-bucket/x.* cannot be"):
        predict(model, data, f"s3://no-such-bucket/x{bucket}")
    with pytest.raises(DataError, match="was given with credentials"):
        predict(model, data, f"s3://key:secret@scores/x{bucket}")


def test_a_folder_that_cannot_be_written_is_named_and_keeps_what_it_has(model: Path, run: Path, tmp_path: Path) -> None:
    """No file may be larger than a few bytes, as on a disk that is full."""
    data, out = str(run.parent.parent / "eval"), tmp_path / "out"
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"file/out cannot be written \(Not a directory\)"):
        predict(model, data, tmp_path / "file" / "out")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        message = r"out cannot be written \(.*\); check address, permissions and disk space"
        with pytest.raises(ValueError, match=message):
            predict(model, data, out, rows_per_file=100)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert not list(out.glob("*part-*")), "what there was of a part is removed"
    assert predict(model, data, out, rows_per_file=100).rows == 301


@pytest.mark.long
def test_ray_workers_and_a_kill_leave_every_row_once(model: Path, tmp_path: Path) -> None:
    """Predictions, and then on the same workers retrieval, which resumes what one process began."""
    small.write(tmp_path / "data", 40_000, files=4, row_group=500)
    out = tmp_path / "out"
    code = (
        "import sys; from rayrec.inference.predict import predict; "
        "predict(sys.argv[1], sys.argv[2], sys.argv[3], rows_per_file=500, columns=['row'], workers=int(sys.argv[4]))"
    )
    index, asked = write_index_and_queries(tmp_path)
    code_of_index = (
        "; from rayrec.inference import RetrieveOptions; from rayrec.inference.retrieve import retrieve; "
        "retrieve(*sys.argv[5:], RetrieveOptions(k=4, vector='vector'), workers=2, rows_per_file=10)"
    )
    options = RetrieveOptions(k=4, vector="vector")
    retrieve(index, str(asked), tmp_path / "here", options, rows_per_file=10)
    shutil.copytree(tmp_path / "here", tmp_path / "items")
    for part in (1, 3):
        (tmp_path / "items" / f"part-00000{part}.parquet").unlink()
    started = subprocess.Popen([sys.executable, "-c", code, str(model), str(tmp_path / "data"), str(out), "0"])
    deadline = time.monotonic() + 120
    while len(list(out.glob("part-*.parquet"))) < 5 and time.monotonic() < deadline:
        time.sleep(0.01)
    os.kill(started.pid, signal.SIGKILL)
    started.wait()
    before = len(list(out.glob("part-*.parquet")))
    assert 5 <= before < 80
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # a short path: Ray's sockets are below it
        dead = Path(folder) / "ray" / "ray_current_cluster"
        dead.parent.mkdir()
        dead.write_text("127.0.0.1:1")
        words = [sys.executable, "-c", code + code_of_index, str(model), str(tmp_path / "data"), str(out), "2"]
        words += [str(index), str(asked), str(tmp_path / "items")]
        subprocess.run(words, check=True, timeout=120, env={**os.environ, "RAY_TMPDIR": folder})
    assert len(list(out.glob("part-*.parquet"))) == 80
    rows = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "data").iterdir())])["row"]
    assert read(out)["row"].equals(rows)
    assert Model(model).labels == ("click", "like")
    found = read(tmp_path / "items")
    assert len(found) == 50 and found.equals(read(tmp_path / "here"))


def write_index_and_queries(folder: Path) -> tuple[Path, Path]:
    """An index of 60 items, and a file of 50 query vectors."""
    vectors = torch.randn(110, 8, generator=torch.Generator().manual_seed(0))
    write_index(folder / "index", vectors[:60], pa.table({"item": range(60)}))
    queries = pa.table({"user": range(50), "vector": vectors[60:].tolist()})
    pq.write_table(queries, folder / "asked.parquet", row_group_size=10)
    return folder / "index", folder / "asked.parquet"
