"""Commands whose places lie in an object store that answers 503, is slow, or cuts connections off."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.fs as pafs
import pyarrow.parquet as pq
import pytest
import yaml

from rayrec.cli import run
from rayrec.inference import ExportStore
from rayrec.serve import App, ModelSpec, ServeConfig, Service
from rayrec.storage.locations import _filesystem
from tests.s3 import Faulty, s3_bucket
from tests.serve.server import Server
from tests.train import small, test_retrieval_run

BUCKET = "s3://faulty"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A store with data, a run of a ranker and one of a retriever, trained without faults."""
    folder = tmp_path_factory.mktemp("healthy")
    with pytest.MonkeyPatch.context() as patch, s3_bucket("faulty") as options:
        filesystem, _ = pafs.FileSystem.from_uri(f"{BUCKET}{options}")

        def put(table: pa.Table, path: str) -> None:
            pq.write_table(table, f"faulty/{path}", filesystem=filesystem)

        for part, rows in (("train", 300), ("eval", 120)):
            for number in range(2):
                put(small.table(rows, seed=number), f"{part}/{number}.parquet")
            test_retrieval_run.write(folder / "towers" / part, rows, seed=0)
        put(pa.table({"id": [f"city {n}" for n in range(9)]}), "cities.parquet")
        pafs.copy_files(str(folder / "towers"), "faulty/towers", destination_filesystem=filesystem)
        with filesystem.open_output_stream("faulty/csv/x.csv") as file:
            file.write("".join(["label,user\n", *(f"{n % 2},{n % 23}\n" for n in range(200))]).encode())
        with filesystem.open_output_stream("faulty/lines/x.jsonl") as file:
            file.write("".join(json.dumps(row) + "\n" for row in small.table(300).to_pylist()).encode())
        found = options.removeprefix("?endpoint_override=").partition("&")[0]
        go_through(found, patch, folder)
        towers = test_retrieval_run.raw_config(Path("towers"), "two_tower")
        for raw in (ranker("ranker"), towers):
            raw["trainer"]["epochs"] = 1
            assert run(["train", str(config_file(raw, folder))]) == 0
        yield found


def ranker(name: str) -> dict[str, Any]:
    """A config whose data and vocabulary lie in the bucket."""
    raw = small.raw_config(Path(), name=name, trainer__epochs=1)
    vocabulary = {"kind": "vocabulary", "path": f"{BUCKET}/cities.parquet", "oov_rows": 1}
    raw["schema"]["sparse"].append({"name": "city", "mapping": vocabulary})
    raw["tables"].append({"name": "city", "rows": 10, "dim": 8, "features": ["city"]})
    return raw


def config_file(raw: dict[str, Any], folder: Path) -> Path:
    """With the places of its data in the bucket, as is that of its run."""
    raw["data"] |= {part: f"{BUCKET}/{raw['data'][part]}" for part in ("train", "eval")}
    raw["storage"]["path"] = f"{BUCKET}/runs"
    (file := folder / f"{raw['name']}.yaml").write_text(yaml.safe_dump(raw))
    return file


def go_through(address: str, patch: pytest.MonkeyPatch, folder: Path) -> None:
    """All URIs mean what is behind this address, and nothing is in the user's cache."""
    for name, value in (("AWS_ENDPOINT_URL", f"http://{address}"), ("AWS_DEFAULT_REGION", "us-east-1")):
        patch.setenv(name, value)
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    _filesystem.cache_clear()


RUN = f"{BUCKET}/runs/ranker"
COMMANDS = {
    "inspect": "data inspect {s3}/train",
    "vocabulary": "data vocabulary {s3}/train --column user --out {tmp}/words.parquet",
    "data index": "data index {s3}/train --out {s3}/index.arrow",
    "convert": "data convert {s3}/csv {tmp}/made",
    "inspect csv": "data inspect {s3}/csv",
    "check": "data check {tmp}/new.yaml",
    "fit": "data fit {tmp}/new.yaml --again --out {tmp}/fitted.yaml",
    "sequence": "data sequence {s3}/train --user user --time at --column item --out {tmp}/histories",
    "init": "init {s3}/train --name first",
    "train of JSON lines": "train {tmp}/new.yaml --name lines --set data.train={s3}/lines",
    "tune": "tune {tmp}/new.yaml --param trainer.seed=[1,2] --trials 1 --set name=new",
    "evaluate": "evaluate {run}",
    "predict": "predict {run} {s3}/eval {s3}/scores",
    "export": "export {run} {tmp}/export",
    "report": "report {run}",
    "verify": "checkpoint verify {run}",
    "content": "checkpoint inspect {run}",
    "weights": "checkpoint convert {run} {tmp}/model.safetensors",
    "index and retrieve": "index {s3}/runs/two_tower {tmp}/index; retrieve {tmp}/index {s3}/towers/eval {tmp}/items",
}


QUICK = ("inspect", "vocabulary", "data index", "convert", "check", "sequence", "weights")  # the others are long


@pytest.mark.parametrize(
    "command", [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in COMMANDS]
)
def test_a_command_outlasts_faults_of_storage(
    command: str, server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config_file(ranker("new"), tmp_path)
    monkeypatch.chdir(tmp_path)
    door = Faulty(server)
    try:
        go_through(door.address, monkeypatch, tmp_path)
        names = {"s3": BUCKET, "run": RUN, "tmp": tmp_path}
        for words in COMMANDS[command].format(**names).split("; "):
            assert run(words.split()) == 0
        assert door.met == {"503", "slow", "cut"}
    finally:
        door.shut()
    if command == "tune":
        go_through(server, monkeypatch, tmp_path)
        options = f"endpoint_override={server}&scheme=http&region=us-east-1"
        filesystem, folder = pafs.FileSystem.from_uri(f"{BUCKET}/runs/new-tune?{options}")
        with filesystem.open_input_file(f"{folder}/trials.json") as file:
            (trial,) = json.loads(file.read())["trials"]
        assert (trial["error"], trial["score"] is not None, trial["evaluations"]) == (None, True, 1)


@pytest.mark.long
def test_a_service_of_a_run_needs_its_storage_only_to_be_exported(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its vocabulary too lies in the bucket, which is away when the service starts; an export there cannot be read."""
    door = Faulty(server)
    try:
        go_through(door.address, monkeypatch, tmp_path)
        assert run(["export", RUN, str(tmp_path / "export")]) == 0 and door.met
    finally:
        door.shut()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    config = ServeConfig(models=(ModelSpec(name="ctr", path=tmp_path / "export"),), port=port)
    answering = Server(App(Service(config.models)))
    try:
        rows = [{"user": 1, "item": 2, "tags": [1, 2], "age": 0.5, "city": city} for city in ("city 1", "city 8")]
        status, answer = answering.ask("POST", "/score", {"rows": rows})
        assert status == 200 and len({round(score, 6) for score in answer["scores"]["label"]}) == 2
    finally:
        answering.close()
    capsys.readouterr()
    assert run(["serve", RUN]) == 1 and f"error: {RUN} cannot be read: " in capsys.readouterr().err


@pytest.mark.long
def test_an_export_is_served_from_its_copy_of_a_faulty_store(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_through(server, monkeypatch, tmp_path)
    assert run(["export", RUN, str(tmp_path / "export")]) == 0
    options = f"endpoint_override={server}&scheme=http&region=us-east-1"
    filesystem, inner = pafs.FileSystem.from_uri(f"{BUCKET}/exports?{options}")
    pafs.copy_files(str(tmp_path / "export"), inner, destination_filesystem=filesystem)
    door = Faulty(server)
    try:
        go_through(door.address, monkeypatch, tmp_path)
        exports = ExportStore(f"{BUCKET}/exports", 1 << 30)
        here = exports.open(exports.newest())
        assert door.met
    finally:
        door.shut()
    for path in (path for path in (tmp_path / "export").rglob("*") if path.is_file()):
        assert (here.folder / path.relative_to(tmp_path / "export")).read_bytes() == path.read_bytes()
