"""CSV, JSON lines, Avro and ORC as a run's data: converted once into its folder, then read as any Parquet."""

from __future__ import annotations

import gzip
import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.orc as paorc
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from rayrec.data import Cursor, DataSet, Manifest, count_column, inspect
from rayrec.data.formats.find_parquet import converting_into, find_parquet
from rayrec.train import Display, Trainer, evaluate_run, parse_config
from rayrec.train.run.mirror import run_here
from tests.data.sets import table as clicks
from tests.data.test_convert import avro, csv, jsonl
from tests.data.test_kills import run
from tests.s3 import s3_bucket
from tests.train import small


def as_orc(rows: list[dict[str, Any]]) -> bytes:
    paorc.write_table(pa.Table.from_pylist(rows), out := io.BytesIO())
    return out.getvalue()


def write_avro(rows: list[dict[str, Any]], path: Path) -> None:
    avro([{**row, "items": row["items"]} for row in rows], path)


ROWS = [{"label": n % 2, "user": f"u{n % 20}", "age": n / 2, "items": [n % 5] * (n % 3)} for n in range(240)]
FORMATS: dict[str, Callable[[list[dict[str, Any]], Path], Any]] = {
    "x.csv.gz": lambda rows, path: path.write_bytes(gzip.compress(csv(rows))),
    "x.tsv": lambda rows, path: path.write_bytes(csv(rows, "\t")),
    "x.jsonl.zst": lambda rows, path: path.write_bytes(pa.Codec("zstd").compress(jsonl(rows), asbytes=True)),
    "x.orc": lambda rows, path: path.write_bytes(as_orc(rows)),
    "x.avro": write_avro,
}
SCHEMA = {
    "label": {"column": "label"},
    "dense": [{"name": "age"}],
    "sparse": [{"name": "user", "mapping": {"kind": "hash"}}],
}


def trained(folder: Path, path: Path, name: str, storage: str | None = None, epochs: int = 2) -> tuple[Any, str]:
    """A run on this file, evaluated on it as well, and what the console says."""
    where = {} if storage is None else {"storage__path": storage}
    raw = small.raw_config(folder, name=name, trainer__epochs=epochs, schema=SCHEMA, **where)
    raw["data"] |= {"train": str(path), "eval": str(path)}
    raw["tables"] = [{"name": "user", "rows": 100, "dim": 8, "features": ["user"]}]
    told = io.StringIO()
    return Trainer(parse_config(raw), display=Display(Console(file=told, width=300))).fit(), told.getvalue()


@pytest.mark.parametrize("name", FORMATS)
def test_a_run_learns_from_other_formats_what_it_learns_from_parquet(tmp_path: Path, name: str) -> None:
    FORMATS[name](ROWS, path := tmp_path / name)
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "y.parquet")
    result, told = trained(tmp_path, path, "a")
    expected, _ = trained(tmp_path, tmp_path / "y.parquet", "b")
    assert (result.train["samples"], result.eval) == (expected.train["samples"], expected.eval)
    assert f"{name}: converted 240 rows to Parquet in" in told and told.count("to Parquet in") == 1
    assert len(list((result.folder / "converted").rglob("*.parquet"))) == 1
    again, told = trained(tmp_path, path, "a")
    assert "already finished" in told and "to Parquet in" not in told and again.eval == result.eval
    assert evaluate_run(result.folder, str(path), display=Display(Console(file=io.StringIO())))["samples"] == 240


def test_a_run_in_object_storage_keeps_there_what_it_makes_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that ranks on other nodes see it, and another machine makes nothing anew, but for what a kill has left."""
    (tmp_path / "day=1").mkdir()
    for name in ("x.csv", "y.csv", "day=1/z.csv"):
        (tmp_path / name).write_bytes(csv(ROWS if name != "y.csv" else []))
    with s3_bucket("made") as options:
        storage = f"s3://made/runs{options}"
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
        result, told = trained(tmp_path, tmp_path / "*.csv", "a", storage)
        assert told.count("to Parquet in") == 2 and result.train["samples"] == 480
        assert not list((tmp_path / "first").rglob("*.parquet")), "nothing is left on the node"
        filesystem, path = pafs.FileSystem.from_uri(f"s3://made/runs/a/converted{options}")

        def kept(suffix: str) -> list[str]:
            found = filesystem.get_file_info(pafs.FileSelector(path, recursive=True))
            return [info.path for info in found if info.path.endswith(suffix)]

        assert len(kept(".parquet")) == 1
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
        again, told = trained(tmp_path, tmp_path / "*.csv", "a", storage, epochs=3)
        assert "to Parquet in" not in told and again.train["samples"] == 720
        with run_here(f"s3://made/runs/a{options}", pytest.fail) as here:
            found = evaluate_run(here, str(tmp_path / "x.csv"), display=Display(Console(file=io.StringIO())))
        assert found["samples"] == 240 and len(kept(".parquet")) == 1
        assert len(kept("_whole")) == 2
        for mark in kept("_whole"):
            filesystem.delete_file(mark)
        _, told = trained(tmp_path, tmp_path / "*.csv", "a", storage, epochs=4)
        assert told.count("to Parquet in") == 2, "what was not whole is made anew"


def test_files_that_change_or_come_are_converted_and_no_others(tmp_path: Path) -> None:
    days = tmp_path / "logs"
    for day in (1, 2):
        (days / f"day={day}").mkdir(parents=True)
        (days / f"day={day}" / "x.csv").write_bytes(csv(ROWS[: 10 * day]))
    told: list[str] = []

    def found() -> dict[str, int]:
        with converting_into(str(tmp_path / "cache"), told.append):
            return {file.uri: file.changed_ns or 0 for file in find_parquet(str(days))}

    first = found()
    assert len(told) == 2 and "10 rows" in told[0] and "20 rows" in told[1]
    assert [Path(uri).parent.name for uri in first] == ["day=1", "day=2"], "in the order of the files"
    assert found() == first and len(told) == 2
    (days / "day=2" / "x.csv").write_bytes(csv(ROWS[:25]))
    (days / "day=3").mkdir()
    (days / "day=3" / "x.csv").write_bytes(csv(ROWS[:30]))
    second = found()
    assert [text.split(": converted ")[1].split(" to Parquet")[0] for text in told[2:]] == ["25 rows", "30 rows"]
    assert set(first) & set(second) == {next(iter(first))} and len(second) == 3
    with converting_into(str(tmp_path / "cache"), told.append):
        data = DataSet(path=str(days), filters=[["day", "=", 3]])
        from rayrec.data import Schema

        assert Manifest.of(data, Schema.model_validate(SCHEMA)).rows == 30


KILLED = """
import sys
from rayrec.data.formats.find_parquet import converting_into, find_parquet
with converting_into(sys.argv[2], lambda text: print(text, flush=True)):
    find_parquet(sys.argv[1])
"""


def test_a_kill_costs_the_files_that_were_not_done(tmp_path: Path) -> None:
    logs, cache = tmp_path / "logs", tmp_path / "cache"
    logs.mkdir()
    (logs / "a.csv").write_bytes(csv(ROWS))
    (logs / "b.csv").write_bytes(csv(ROWS[:1]) + b"1,u,0.5\n" * 3_000_000)
    process = subprocess.Popen([sys.executable, "-c", KILLED, logs, cache], stdout=subprocess.PIPE)
    try:
        until = time.monotonic() + 120
        while time.monotonic() < until and process.poll() is None:
            began = [path for path in cache.glob("_*") if path.is_dir() and any(path.iterdir())]
            if began and any(not path.name.startswith("_") for path in cache.iterdir()):
                break
            time.sleep(0.002)
        assert process.poll() is None, "it was killed in the midst of the second file"
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()
    (done,) = (path for path in cache.iterdir() if not path.name.startswith("_"))
    before = os.stat(next(done.glob("*.parquet"))).st_ino
    told: list[str] = []
    with converting_into(str(cache), told.append):
        files = [file.uri for file in find_parquet(str(logs))]
    assert len(told) == 1 and "b.csv: converted 3,000,001 rows" in told[0]
    assert os.stat(files[0]).st_ino == before and not [p for p in cache.glob("_*") if p.is_dir()]
    assert [sum(pq.read_metadata(uri).num_rows for uri in files if done.name in uri)] == [240]
    assert sum(pq.read_metadata(uri).num_rows for uri in files) == 3_000_241


def test_every_row_of_other_formats_comes_once_though_ranks_are_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that begin together convert once."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    paorc.write_table(clicks(700), tmp_path / "data" / "a.orc")
    paorc.write_table(clicks(500, 700), tmp_path / "data" / "b.orc")
    find_parquet(str(tmp_path / "data"))
    how = {"order": {"interleave": 2}, "limits": {"window_rows": 40}, "filters": []}
    cursor, seen = Cursor.start(0), []
    for world in (2, 3):
        cursor, rows = run(tmp_path, cursor, world, how, 4)
        seen += rows
    assert 0 < len(seen) < 1000, "they were killed in the middle"
    cursor, rows = run(tmp_path, cursor, 1, how, None)
    assert sorted(seen + rows) == list(range(1200))


def test_tools_take_what_training_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "x.csv").write_bytes(csv(ROWS))
    assert inspect(str(tmp_path / "x.csv")).rows == 240
    assert "x.csv: converted 240 rows to Parquet in" in capsys.readouterr().err
    count_column(str(tmp_path / "x.csv"), "user", tmp_path / "words.parquet")
    assert pq.read_metadata(tmp_path / "words.parquet").num_rows == 20
    assert not capsys.readouterr().err, "it is Parquet by now"
