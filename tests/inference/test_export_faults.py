"""Exports that cannot be made, or are not whole: refused by name, and nothing stays behind."""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from rayrec.inference import ExportError, ExportOptions, Model
from rayrec.train import TrainError, export_run


def test_an_export_outside_its_limits_fails_unless_forced(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    metrics = copy / "metrics.jsonl"
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "eval":
            line["auc"] += 0.01
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = r"301 rows are outside the limits: AUC of label: the trainer recorded 0\.\d+ .* here it is 0\.\d{6}"
    with pytest.raises(ExportError, match=text):
        export_run(copy, tmp_path / "model")
    assert not (tmp_path / "model").exists() and not list(tmp_path.glob(".model*"))


def test_what_cannot_be_exported_is_named(run: Path, tmp_path: Path, exported: Path) -> None:
    with pytest.raises(ExportError, match="already exists"):
        export_run(run, exported)
    with pytest.raises(TrainError, match="neither a run folder"):
        export_run(tmp_path, tmp_path / "model")
    with pytest.raises(TrainError, match="no complete checkpoint"):
        export_run(run / "checkpoints" / "step_99999999", tmp_path / "model")
    with pytest.raises(ValueError, match="unknown table format 'int3'"):
        ExportOptions(tables="int3")
    with pytest.raises(ExportError, match="--budget"):
        ExportOptions(tables="int8", budget=0.5)


def test_a_missing_compiler_is_told_before_a_table_is_read(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    for data in (copy / "checkpoints").rglob("*.safetensors"):
        data.unlink()
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ExportError, match=r"needs a C\+\+ compiler, and no-such-compiler is missing: install it"):
        export_run(copy, tmp_path / "model", ExportOptions(target="aoti"))


def test_a_folder_that_cannot_be_written_is_named_and_nothing_stays(run: Path, tmp_path: Path) -> None:
    """A file in its way, and a disk that is full: no file may be larger than a few bytes."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match=r"out was not written: .*: (Not a directory|File exists)"):
        export_run(run, tmp_path / "file" / "out")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(ExportError, match=r"model was not written: .*File too large; check permissions"):
            export_run(run, tmp_path / "model")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_export_left_is_removed_by_the_next_of_its_name(run: Path, tmp_path: Path) -> None:
    """And what one that runs holds, or is named otherwise, stays."""
    hold = "import sys, time; from pathlib import Path; from rayrec.inference.artifact import scratch_folder\n"
    hold += "with scratch_folder(Path(sys.argv[1])): print('held', flush=True); time.sleep(60)"
    started = [
        subprocess.Popen([sys.executable, "-c", hold, str(tmp_path / name)], stdout=subprocess.PIPE)
        for name in ("model", "model", "other")
    ]
    for process in started:
        assert process.stdout is not None and process.stdout.readline() == b"held\n"
    for process in started[1:]:
        process.kill()
        process.communicate()
    (tmp_path / ".model.mine").mkdir()
    export_run(run, tmp_path / "model")
    kept = sorted(path.name.rsplit(".", 1)[0] for path in tmp_path.iterdir())
    started[0].terminate()
    started[0].communicate()
    assert kept == [".model", ".model", ".other", "model"]


@pytest.mark.parametrize("damage", ["bytes", "cut", "missing", "index", "outside", "format", "target"])
def test_a_damaged_folder_is_refused_by_name(exported: Path, tmp_path: Path, damage: str) -> None:
    copy = shutil.copytree(exported, tmp_path / "model")
    tables, index, target, text = copy / "tables.bin", copy / "export.json", None, r"tables\.bin"
    raw = json.loads(index.read_text())
    if damage == "bytes":
        data = bytearray(tables.read_bytes())
        data[17] ^= 1
        tables.write_bytes(data)
    elif damage == "cut":
        tables.write_bytes(tables.read_bytes()[:-1])
    elif damage == "missing":
        tables.unlink()
    elif damage == "index":
        index.write_text("{")
        text = r"export\.json cannot be read"
    elif damage == "outside":
        raw["files"]["../secret"] = [1, 1]
        index.write_text(json.dumps(raw))
        text = "outside the folder"
    elif damage == "format":
        index.write_text(json.dumps({**raw, "format": 99}))
        text = "format 99"
    else:
        target, text = "aoti", "--target aoti"
    with pytest.raises(ExportError, match=text):
        Model(copy, target=target)
