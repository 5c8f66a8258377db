"""Checkpoints and whole runs in object storage: a local S3 server."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.checkpoint import CheckpointStore
from rayrec.cli import run
from rayrec.distributed import EmbOptimType
from rayrec.models import DLRM, Batch
from rayrec.storage import open_folder
from rayrec.train import StorageError
from tests.checkpoint.test_store import build, mean_losses, train
from tests.ranks import on_ranks
from tests.s3 import KEYS, Door, s3_bucket
from tests.train.small import whole_checkpoints
from tests.train.test_fit import shown, trainer, write_all

ADAGRAD = EmbOptimType.EXACT_ADAGRAD


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """URI options of a bucket on an S3 server, with keys for it in the environment."""
    with s3_bucket("models") as options:
        yield options


def go_on(group: dist.ProcessGroup, uri: str, kind: str, save: bool) -> list[float]:
    os.environ.update(KEYS)
    model, dense = build(group, kind, ADAGRAD, 1 if save else 2)
    store = CheckpointStore(uri, keep=1)
    if save:
        train(model, dense, group, range(2))
        store.save(2, model, dense, group=group)
        train(model, dense, group, range(2, 3))
        store.save(3, model, dense, group=group)
    else:
        checkpoint = store.latest()
        assert checkpoint is not None and checkpoint.step == 3
        store.load(checkpoint, model, dense, group)
    return train(model, dense, group, range(3, 6))


def test_saved_to_s3_by_two_ranks_and_loaded_by_four(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    uri = f"s3://models/run/checkpoints{bucket}"
    before = mean_losses(on_ranks(2, go_on, uri, "rw", True))
    after = mean_losses(on_ranks(4, go_on, uri, "cw", False))
    torch.testing.assert_close(after, before, atol=1e-5, rtol=1e-5)
    root = open_folder(uri)
    assert root.names() == ["attempt.json", "step_00000003-0001"], "the older one is gone"
    assert len(whole_checkpoints(f"s3://models/run{bucket}")) == 1
    folder = root.sub("step_00000003-0001")
    data = bytearray(folder.read("data-00001.safetensors"))
    data[-1] ^= 1
    folder.write("data-00001.safetensors", bytes(data))
    assert run(["checkpoint", "verify", f"s3://models/run{bucket}"]) == 1
    told = " ".join("".join(capsys.readouterr()).split())
    assert "data-00001.safetensors" in told and "the bytes do not match their checksum" in told


def test_a_run_lives_in_s3_and_goes_on_on_another_machine(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path)
    storage: dict[str, Any] = {"storage__path": f"s3://models/runs{bucket}"}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    first = trainer(tmp_path, trainer__epochs=1, **storage).fit()
    assert first.checkpoint == f"s3://models/runs/small/checkpoints/step_00000016-0001{bucket}"
    there = open_folder(f"s3://models/runs/small{bucket}")
    assert {"config.yaml", "given.yaml", "metrics.jsonl", "report.html", "result.json", "checkpoints"} <= set(
        there.names()
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    second = trainer(tmp_path, trainer__epochs=2, **storage).fit()
    straight = trainer(tmp_path, name="straight", trainer__epochs=2).fit()
    assert (second.steps, second.eval) == (32, straight.eval)
    assert "resumed from the checkpoint of step 16" in shown(tmp_path)
    parts = sorted(name for name in there.names() if name.startswith("metrics.jsonl"))  # a log that grows has parts
    lines = "".join(there.read(part).decode() for part in parts).splitlines()
    assert sum('"kind": "eval"' in line for line in lines) == 2
    (curves,) = there.sub("tensorboard").names()[:1]
    assert there.sub("tensorboard").read(curves), "another machine draws the curves too"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "third"))
    again = trainer(tmp_path, fresh=True, trainer__epochs=1, trainer__profile={"steps": [2, 3]}, **storage)
    assert again.fit().steps == 16
    runs = open_folder(f"s3://models/runs{bucket}")
    (aside,) = (name for name in runs.names() if name.startswith("small.before-"))
    assert runs.sub(aside).sub("checkpoints").names()[-1] == "step_00000032-0002"
    assert runs.sub(aside).read("run_id") != there.read("run_id")
    assert there.sub("checkpoints").names()[-1] == "step_00000016-0001"
    assert there.sub("profile").names() == ["steps-2-3.json.gz"]
    assert b"profile/steps-2-3.json.gz" in there.read("report.html")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))  # whose copy is of the run that was set aside
    third = trainer(tmp_path, trainer__epochs=2, **storage)
    assert third.fit().steps == 32
    assert third.folder.run_id() == again.folder.run_id() and third.folder.last_attempt() == 2


def test_a_run_in_s3_is_read_on_a_machine_that_did_not_train_it(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_all(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
    trained = trainer(tmp_path, name="far", trainer__epochs=1, storage__path=f"s3://models/runs{bucket}")
    wanted = trained.fit().eval
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "second"))
    place, there = f"s3://models/runs/far{bucket}", open_folder(f"s3://models/runs/far{bucket}")
    assert run(["evaluate", place]) == 0
    evaluated = json.loads(there.read("evaluation.json"))
    assert (evaluated["auc"], evaluated["step"]) == ((wanted or {})["auc"], 16)
    checkpoint = place.replace("far?", "far/checkpoints/step_00000016-0001?")
    for source, out in ((place, "run"), (checkpoint, "checkpoint")):
        assert run(["export", source, str(tmp_path / out)]) == 0
        assert (tmp_path / out / "tables.bin").exists()
    assert len(there.read("exports.jsonl").decode().splitlines()) == 2
    there.write("report.html", b"old")
    assert run(["report", place]) == 0 and there.read("report.html") != b"old"
    assert run(["runs", "compare", place, place, "--html", str(tmp_path / "page.html")]) == 0
    capsys.readouterr()
    assert run(["runs", "list", f"s3://models/runs{bucket}"]) == 0
    listed = capsys.readouterr().out
    assert "far" in listed and "finished" in listed
    assert run(["runs", "list", f"s3://models/nothing{bucket}"]) == 0 and "no runs in" in capsys.readouterr().out
    with trained.folder.locked():  # as the trainer holds it on the machine that trains
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "first"))
        trained.folder.metrics.write_text("")
        assert run(["report", place]) == 0 and trained.folder.metrics.read_text() == ""
    capsys.readouterr()
    assert run(["evaluate", f"s3://models/none{bucket}"]) == 1
    assert "s3://models/none" in (told := capsys.readouterr().err) and "is not a run folder" in told


def test_storage_that_cannot_be_reached_is_told(bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(StorageError, match=r"storage\.path: .*cannot be read and written"):
        trainer(tmp_path, storage__path=f"s3://no-such-bucket/runs{bucket}").fit()
    with pytest.raises(StorageError, match=r"storage\.path: cannot open .*xyz://somewhere"):
        trainer(tmp_path, storage__path="xyz://somewhere").fit()


@pytest.mark.slow
def test_a_run_outlasts_storage_that_is_away_for_its_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage is shut in the second epoch, which then ends, and opened again 3 s later."""
    write_all(tmp_path, rows=300)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with s3_bucket("models") as options:
        server = options.removeprefix("?endpoint_override=").partition("&")[0]
        door = Door(server)
        steps: list[int] = []

        class Shuts(DLRM):
            def forward(self, batch: Batch) -> Any:
                steps.append(1)
                if len(steps) == 8:
                    door.shut()
                    threading.Timer(3.0, door.reopen).start()
                return super().forward(batch)

        path = f"s3://models/away{options.replace(server, door.address)}"
        changes = {"storage__path": path, "trainer__checkpoint_every": 3, "data__eval": None}
        result = trainer(tmp_path, factory=Shuts, **changes).fit()
        kept = CheckpointStore(f"s3://models/away/small/checkpoints{options}").latest()
    assert kept is not None and kept.step == result.steps == 10
