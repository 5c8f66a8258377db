"""ExportStore in object storage are served from copies on the node; checksums are computed once a node."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow.fs as pafs
import pytest

from rayrec.cli import run
from rayrec.inference import ExportError
from rayrec.serve import JSON, ModelSpec, ServeConfig, Service, load_serve_config
from rayrec.serve.on_ray import check
from rayrec.serve.versions import check_version
from rayrec.storage import open_folder
from tests.s3 import s3_bucket
from tests.serve.server import GOOD
from tests.serve.test_service import version_of

BODY = json.dumps({"rows": [GOOD] * 3}).encode()
BUCKET = "exports"


@pytest.fixture
def options(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3_bucket(BUCKET) as options:
        yield options


def send(folder: Path, place: str) -> None:
    """The folder's files below a URI, its index last."""
    filesystem, inner = pafs.FileSystem.from_uri(place)
    files = sorted((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.name == "export.json")
    for path in files:
        with filesystem.open_output_stream(f"{inner}/{path.relative_to(folder).as_posix()}") as stream:
            stream.write(path.read_bytes())


def copies(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache" / "rayrec" / "exports").glob("*") if path.is_dir()]


def scores(service: Service) -> tuple[str, list[float]]:
    answer = service.score(BODY, JSON)
    return answer.version, list(answer.scores["label"])


def test_versions_in_a_bucket_are_served_and_watched_for(model: Path, tmp_path: Path, options: str) -> None:
    local = [version_of(model, tmp_path / f"v{number}", number / 3) for number in (9, 10)]
    expected = [scores(Service([ModelSpec(path=folder)])) for folder in local]
    place = f"s3://{BUCKET}/ctr{options}"
    with pytest.raises(ExportError, match="has no export"):
        check(ServeConfig(models=(ModelSpec(path=place),)))
    send(local[0], f"s3://{BUCKET}/ctr/v9{options}")
    service = Service([ModelSpec.parse(f"ctr={place}")])
    assert scores(service) == expected[0] and not service.refresh()
    (tmp_path / "tables").mkdir()
    shutil.copy(local[1] / "tables.bin", tmp_path / "tables")
    send(tmp_path / "tables", f"s3://{BUCKET}/ctr/v10{options}")
    assert not service.refresh() and service.health()["models"][0]["refused"] == {}, "it has no index yet"
    send(local[1], f"s3://{BUCKET}/ctr/v10{options}")
    assert service.refresh() == 1 and scores(service) == expected[1]
    assert run(["service", "rollback", place]) == 0 and run(["service", "rollback", place, "--to", "v8"]) == 1
    assert json.loads(open_folder(place).read("audit.jsonl"))["to"] == "v9"
    assert service.refresh() == 1 and scores(service) == expected[0]
    pinned = Service([ModelSpec(path=place, version="v10")])
    assert scores(pinned) == expected[1]
    open_folder(place).write("current", b"../v9")
    assert not service.refresh()
    assert "which is not in this folder" in str(service.health()["models"][0]["refused"])
    assert scores(service) == expected[0]


def test_a_node_copies_an_export_once_and_serves_it_when_the_bucket_is_gone(
    model: Path, tmp_path: Path, options: str
) -> None:
    place = f"s3://{BUCKET}/one{options}"
    send(model, place)
    first = Service([ModelSpec(path=place)])
    filesystem, inner = pafs.FileSystem.from_uri(place)
    for name in ("tables.bin", "graph.pt2", "mapping.json", "parity.json"):
        filesystem.delete_file(f"{inner}/{name}")
    assert scores(Service([ModelSpec(path=place)])) == scores(first)
    (copy,) = copies(tmp_path)
    assert {path.relative_to(copy) for path in copy.rglob("*")} == {
        path.relative_to(model) for path in model.rglob("*")
    }


def test_the_cache_keeps_to_its_limit_and_never_removes_what_is_served(
    model: Path, tmp_path: Path, options: str
) -> None:
    places = []
    for number in range(4):
        folder = version_of(model, tmp_path / f"v{number}", number / 3)
        places.append(f"s3://{BUCKET}/{number}{options}")
        send(folder, places[-1])
    size = sum(path.stat().st_size for path in (tmp_path / "v0").rglob("*") if path.is_file())
    limit = int(2.5 * size)

    def opened(number: int, limit: int = limit) -> Service:
        gc.collect()  # services that are no more hold no copy
        return Service([ModelSpec(path=places[number])], cache_bytes=limit)

    served = opened(0)
    opened(1)
    before = {path.name for path in copies(tmp_path)}
    opened(2)
    assert len(copies(tmp_path)) == 2 and len({path.name for path in copies(tmp_path)} & before) == 1
    assert served.score(BODY, JSON).version == "v0"
    shutil.rmtree(tmp_path / "v0")
    again = opened(0)  # of the copy that was held, the oldest
    assert scores(again) == scores(served)
    other = opened(3)
    with pytest.raises(ExportError, match=r"does not fit .*: cache_bytes is .* in use need .*; raise cache_bytes"):
        opened(1)
    assert len(copies(tmp_path)) == 2
    del other
    with pytest.raises(ExportError, match="does not fit"):
        opened(1, limit=1000)


@pytest.mark.parametrize("fault", ["flipped", "missing", "outside"])
def test_what_is_damaged_in_a_bucket_is_refused_by_name_and_leaves_nothing(
    model: Path, tmp_path: Path, options: str, fault: str
) -> None:
    good, bad = (version_of(model, tmp_path / name, number) for number, name in enumerate(("v1", "v2")))
    send(good, f"s3://{BUCKET}/ctr/v1{options}")
    service = Service([ModelSpec(path=f"s3://{BUCKET}/ctr{options}")])
    tables, index = bad / "tables.bin", bad / "export.json"
    data = tables.read_bytes()
    if fault == "outside":
        raw = json.loads(index.read_text())
        raw["files"]["../../secret"] = [1, 1]
        index.write_text(json.dumps(raw))
    elif fault == "missing":
        tables.unlink()
    else:
        tables.write_bytes(bytes([data[0] ^ 1]) + data[1:])
    send(bad, f"s3://{BUCKET}/ctr/v2{options}")
    assert service.refresh() == 0 and service.score(BODY, JSON).version == "v1"
    (problem,) = service.health()["models"][0]["refused"].values()
    assert {"outside": "'../../secret', which is outside", "missing": "v2"}.get(fault, "tables.bin differs") in problem
    assert len(copies(tmp_path)) == 1 or [path.suffix for path in copies(tmp_path)].count("") == 1
    if fault == "flipped":
        tables.write_bytes(data)
        time.sleep(1.1)  # times of objects are whole seconds
        send(bad, f"s3://{BUCKET}/ctr/v2{options}")
        assert service.refresh() == 1 and service.score(BODY, JSON).version == "v2"
        assert not [path for path in copies(tmp_path) if path.suffix], "what was begun is removed"


def test_checksums_are_computed_once_a_node_until_a_file_changes(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    folder = version_of(model, tmp_path / "v1", 0.5)
    Service([ModelSpec(path=folder)])
    check_alone = "from rayrec.serve.versions import check_version as c; import rayrec.inference.artifact as a, sys\n"
    check_alone += "a.checksum = None\nc(__import__('pathlib').Path(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", check_alone, str(folder)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    times = (folder / "tables.bin").stat()
    with open(folder / "tables.bin", "r+b") as file:
        byte = file.read(1)
        file.seek(0)
        file.write(bytes([byte[0] ^ 1]))
    os.utime(folder / "tables.bin", ns=(times.st_atime_ns, times.st_mtime_ns))
    with pytest.raises(ExportError, match=r"tables\.bin is damaged"):
        Service([ModelSpec(path=folder)])
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")  # where nothing can be kept
    with pytest.raises(ExportError, match=r"tables\.bin is damaged"):
        check_version(folder)


def test_marks_of_checked_exports_stay_few_though_other_processes_remove_them_too(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    marks = tmp_path / "cache" / "rayrec" / "checked"
    marks.mkdir(parents=True)
    for number in range(1010):
        mark = marks / f"{number:04d}"
        mark.touch()
        os.utime(mark, (number, number))
    (marks / "removed").symlink_to(tmp_path / "nothing")  # listed, but gone when it is looked at
    check_version(version_of(model, tmp_path / "v1", 0.5))
    left = sorted(path.name for path in marks.iterdir() if path.exists())
    assert len(left) == 1000 and left[0] == "0011", "the newest, and the mark of this export"


def test_a_file_may_name_a_bucket_and_a_limit_but_no_secret(tmp_path: Path) -> None:
    text = "cache_bytes: 1000\nmodels: [{name: ctr, path: 's3://b/x?region=us-east-1', version: v7}]\n"
    (tmp_path / "serve.yaml").write_text(text)
    config = load_serve_config(tmp_path / "serve.yaml")
    assert config.cache_bytes == 1000 and config.models[0].folder == "s3://b/x/v7?region=us-east-1"
    assert ServeConfig.model_validate(config.model_dump(mode="json")) == config
    assert ModelSpec.parse("s3://b/x?region=eu@0.5").share == 0.5
    (tmp_path / "serve.yaml").write_text(text.replace("b/x", "key:secret@b/x"))
    with pytest.raises(ValueError, match="was given with credentials") as caught:
        load_serve_config(tmp_path / "serve.yaml")
    assert "secret@" not in str(caught.value)
