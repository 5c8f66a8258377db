"""Storage of checkpoints that fails, hangs or is another launch's by now: what a run waits for, and what ends it."""

from __future__ import annotations

import errno
import json
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from rayrec.checkpoint import TakenOverError
from rayrec.checkpoint.ownership import LAUNCH_FILE, Attempt, Launch, Lease
from rayrec.models import DLRM, Batch
from rayrec.storage import LocalFolder, retries
from rayrec.train import ResourceError, StorageError, TrainError
from rayrec.train.worker import storage_retry
from tests.train.small import control_of, write_all
from tests.train.test_alone import ROWS, job_of, run, saved
from tests.train.test_fit import records, trainer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("outages"), rows=ROWS)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = (retries, "FIRST_WAIT_S", 0.01), (retries, "LONGEST_WAIT_S", 0.05), (storage_retry, "REPORT_EVERY_S", 0.1)
    for module, name, seconds in waits:
        monkeypatch.setattr(module, name, seconds)


def break_storage(monkeypatch: pytest.MonkeyPatch, method: str, error: OSError, times: int, of: str = "") -> list[str]:
    """The first calls of a folder's method fail; returns the files or folders that they were for."""
    whole, failed = getattr(LocalFolder, method), []

    def broken(folder: LocalFolder, *given: Any) -> Any:
        name = given[0] if given else folder.name
        if len(failed) < times and name.startswith(of):
            failed.append(name)
            raise error
        return whole(folder, *given)

    monkeypatch.setattr(LocalFolder, method, broken)
    return failed


STALE = OSError(errno.ESTALE, "Stale file handle")
EXPIRED = PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.parametrize("error", [STALE, EXPIRED])
def test_a_start_waits_for_its_storage(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: OSError
) -> None:
    failed = break_storage(monkeypatch, "names", error, times=8)
    job = job_of(data, tmp_path, trainer__epochs=1)
    told = run(job)[1]
    assert len(failed) == 8 and saved(job) == [5]
    texts = [record["message"] for record in told.all("event") if record["event"] == "storage"]
    assert texts[0].startswith("Still finding the checkpoints after 0 min: waiting for the storage (")
    assert texts[0].endswith(f"{error.strerror}); retrying for up to 10 min.")


def test_the_last_checkpoint_waits_for_its_storage(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = break_storage(monkeypatch, "create", STALE, times=6, of="data-")
    job = job_of(data, tmp_path, trainer__checkpoint_every=None)
    outcome, told = run(job)
    assert len(failed) == 6 and saved(job) == [10] and "step_00000010-" in outcome["checkpoint"]
    assert "Still saving the final checkpoint (step 10) after 0 min: waiting" in told.all("event")[0]["message"]


def test_a_wait_for_storage_ends(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a disk that fills, with what is kept and what is not."""
    error = OSError(errno.ENOSPC, "No space left on device", "data-00000")
    break_storage(monkeypatch, "create", error, times=10_000, of="data-")
    job = job_of(data, tmp_path, trainer__checkpoint_every=None, storage={"patience_s": 0.2})
    text = r"No space left on device; the final checkpoint \(step 10\) could not be saved, and there is no earlier one"
    with pytest.raises(OSError, match=text) as caught:
        run(job)
    assert (saved(job), caught.value.errno, caught.value.filename) == ([], errno.ENOSPC, "data-00000")


def test_a_full_disk_at_the_start_keeps_no_run_from_training(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_storage(monkeypatch, "write", OSError(errno.ENOSPC, "No space left on device"), times=1, of="attempt")
    job = job_of(data, tmp_path)
    run(job)
    assert saved(job) == [6, 10]


@pytest.mark.parametrize("background", [True, False])
def test_a_checkpoint_that_fails_costs_only_itself(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    break_storage(monkeypatch, "create", STALE, times=1, of="data-")
    job = job_of(data, tmp_path, storage={"background": background})
    told = run(job)[1]
    assert told.steps("event", "save_failed") == [6] and saved(job) == [10]


def test_scores_are_not_waited_for(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = LocalFolder.write

    def slow(folder: LocalFolder, name: str, content: bytes) -> None:
        time.sleep(0.5 if name == "scores.json" else 0.0)
        whole(folder, name, content)

    monkeypatch.setattr(LocalFolder, "write", slow)
    storage = {"keep_best": "auc", "patience_s": 0.05, "background": False}
    job = job_of(data, tmp_path, trainer__epochs=1, storage=storage)
    told = run(job)[1]
    (text,) = [record["message"] for record in told.all("event") if record["event"] == "save_failed"]
    assert text == "Could not store the metrics of step 5: the storage has not answered for 0.05 s"


def test_training_that_waits_for_checkpoints_says_so_once(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayrec.checkpoint.store.fits_in_memory", lambda need, group: False)
    job = job_of(data, tmp_path, trainer__checkpoint_every=3, storage={"background": True})
    told = run(job)[1]
    assert told.steps("event", "save_waits") == [3] and saved(job) == [6, 9, 10]


def test_what_waiting_cannot_mend_is_raised_at_once() -> None:
    reports: list[str] = []
    retry = storage_retry.StorageRetry(control_of(), retries.Patience(outage_s=60), reports.append)
    for error in (ValueError("a label"), NotADirectoryError("runs"), IsADirectoryError("manifest.json")):
        tries = []

        def act(error: Exception = error, tries: list[int] = tries) -> None:
            tries.append(1)
            raise error

        with pytest.raises(type(error)):
            retry("reading", act)
        assert len(tries) == 1
    assert not reports and storage_retry.call_within(5.0, lambda: 7) == 7
    with pytest.raises(ValueError, match="x"):
        storage_retry.call_within(5.0, lambda: int("x"))


def another_launch(folder: Path) -> Launch:
    """Takes the run over, from another machine."""
    launch, root = replace(Launch.here(), host="elsewhere"), LocalFolder(folder / "checkpoints")
    root.write(LAUNCH_FILE, json.dumps({"launch": asdict(launch), "beat": time.time()}).encode())
    Attempt.claim(root, launch)
    return launch


def test_a_launch_that_was_taken_over_ends_and_says_by_whom(data: Path, tmp_path: Path) -> None:
    run_folder = tmp_path / "runs" / "small"

    class TakenOver(DLRM):
        steps = 0

        def forward(self, batch: Batch) -> Any:
            TakenOver.steps += 1
            if TakenOver.steps == 3:
                another_launch(run_folder)
            return super().forward(batch)

    changes = {"storage__path": str(tmp_path / "runs"), "trainer__checkpoint_every": 2}
    with pytest.raises(
        TrainError, match=r"another driver \(process .* on elsewhere, .*\) took over .*; this one exits$"
    ):
        trainer(data, factory=TakenOver, **changes).fit()
    assert (run_folder / "checkpoints" / LAUNCH_FILE).exists(), "it is the other's"
    job = job_of(data, tmp_path / "runs")
    with pytest.raises(TakenOverError):
        run(replace(job, launch=Launch.here()))


def test_a_second_launch_is_refused_where_locks_do_not_reach(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of `file://` and object storage: each machine has a folder of its own for the run."""
    path = f"file://{tmp_path}/runs"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "a"))
    first = trainer(data, storage__path=path, trainer__epochs=1).fit()
    assert LocalFolder(tmp_path / "runs" / "small" / "checkpoints").names()[0] == "attempt.json", "nothing is held now"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    with Lease(LocalFolder(tmp_path / "runs" / "small" / "checkpoints")).take():
        with pytest.raises(StorageError, match="in use by a run that is still going"):
            trainer(data, storage__path=path, trainer__epochs=2).fit()
        assert trainer(data, storage__path=path, trainer__epochs=1).fit() == replace(
            first, folder=trainer(data, storage__path=path).folder.path
        ), "the result of a finished run is there for all"
    assert trainer(data, storage__path=path, trainer__epochs=2).fit().steps == 10
    assert [record["event"] for record in records(trainer(data, storage__path=path).folder.path, "event")].count(
        "resumed"
    ) == 1


def test_checkpoints_that_cannot_be_written_start_nothing(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_storage(monkeypatch, "write", EXPIRED, times=1, of=LAUNCH_FILE)
    with pytest.raises(StorageError, match=r"checkpoints cannot be written \(Permission denied\); nothing was started"):
        trainer(data, storage__path=str(tmp_path / "runs")).fit()


def test_a_run_that_does_not_fit_keeps_the_result_that_it_has(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"storage__path": str(tmp_path / "runs"), "trainer__epochs": 1}
    result = trainer(data, **changes).fit()
    monkeypatch.setattr("rayrec.train.trainer.run_job", lambda *_: (_ for _ in ()).throw(ResourceError("too few CPUs")))
    more = {**changes, "trainer__epochs": 2}
    with pytest.raises(ResourceError, match="too few CPUs"):
        trainer(data, **more).fit()
    monkeypatch.undo()
    assert trainer(data, **changes).fit() == result, "it is still the one of a finished run"
    assert trainer(data, **more).fit().epochs == 2


def test_an_earlier_run_that_goes_on_elsewhere_is_not_set_aside(data: Path, tmp_path: Path) -> None:
    changes = {"storage__path": str(tmp_path / "runs"), "trainer__epochs": 1}
    trainer(data, **changes).fit()
    in_use = pytest.raises(StorageError, match="in use")
    with Lease(LocalFolder(tmp_path / "runs" / "small" / "checkpoints")).take(), in_use:
        trainer(data, fresh=True, **changes).fit()
    assert trainer(data, fresh=True, **changes).fit().steps == 5
