"""`rayrec stop` and `rayrec resume`: a run ends at a request from elsewhere, and goes on from its folder alone."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path

import pytest
import yaml

from rayrec.checkpoint import CheckpointStore
from rayrec.cli import run
from rayrec.train.driver import run_job
from tests.train.small import raw_config, write_all


def await_true(condition: object, what: str) -> None:
    assert callable(condition)
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_run_stops_at_a_request_and_resumes_from_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    monkeypatch.setattr(run_job, "STOP_CHECK_S", 0.1)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    storage = f"{scheme}{tmp_path}/runs"
    config, place = tmp_path / "train.yaml", f"{storage}/small"
    raw = raw_config(write_all(tmp_path, rows=200), storage__path=storage, trainer__epochs=100_000, data__eval=None)
    config.write_text(yaml.safe_dump(raw))
    statuses: list[int] = []
    training = threading.Thread(target=lambda: statuses.append(run(["train", str(config)])))
    training.start()
    store = CheckpointStore(f"{place}/checkpoints")
    await_true(lambda: store.latest() is not None, "no checkpoint was written")
    assert run(["checkpoint", "prune", place, "--keep", "1"]) == 1
    assert "is in use by a run that is still going" in capsys.readouterr().err
    assert run(["resume", place]) == 1
    assert "is in use" in capsys.readouterr().err
    assert run(["stop", place, "--wait", "120"]) == 0
    training.join(timeout=180)
    told = capsys.readouterr()
    stopped = store.latest()
    assert stopped is not None and statuses == [128 + 15], told
    assert "to save a last checkpoint and stop." in told.out
    assert f"Its newest checkpoint is of step {stopped.step}; `rayrec resume {place}` continues it." in told.out
    assert run(["stop", place]) == 0 and f"{place} is not running" in capsys.readouterr().out
    assert not set(store.root.names()) & {"launch.json", "stop.json"}

    config.unlink()
    if not scheme:  # a folder may have moved
        place = str(tmp_path / "elsewhere" / "renamed")
        shutil.move(tmp_path / "runs" / "small", place)
    epochs = stopped.extra["position"]["cursor"]["epoch"] + 2  # it may have stopped at the end of an epoch
    assert run(["resume", place, "--set", f"trainer.epochs={epochs}"]) == 0
    newest = CheckpointStore(f"{place}/checkpoints").latest()
    assert newest is not None and newest.manifest.attempt == 2 and newest.step > stopped.step
    assert f"resumed from the checkpoint of step {stopped.step}" in capsys.readouterr().out
    assert run(["resume", place, "--set", f"trainer.epochs={epochs}"]) == 0
    assert "already finished" in capsys.readouterr().out


def test_what_is_not_a_run_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("stop", "resume"):
        assert run([command, str(tmp_path / "none")]) == 1
        assert "none is not a run folder: it has no config.yaml" in capsys.readouterr().err
