"""A save beside training: its share of a CPU, and the memory that it leaves alone."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Thread, get_native_id

import pytest

from rayrec.checkpoint.saving import SaveThread
from rayrec.checkpoint.writer import FREE_S, SHARE, StoppedError, Throttle
from rayrec.storage.folder import LocalFolder
from tests.checkpoint.test_parts import save_of


def work(seconds: float) -> None:
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


def rests(pace: Throttle, used: float) -> float:
    """Seconds that a thread rests which has used so many seconds of a CPU since it rested last."""
    taken = []

    def run() -> None:
        work(FREE_S)
        pace.pause()
        for _ in range(2):
            work(used)
            began = time.monotonic()
            pace.pause()
            taken.append(time.monotonic() - began)

    thread = Thread(target=run)
    thread.start()
    thread.join()
    return min(taken)


def test_a_thread_rests_until_it_has_used_its_share() -> None:
    assert rests(Throttle(0.1), 0.01) >= 0.089
    assert rests(Throttle(0.5), 0.01) >= 0.0099
    assert rests(Throttle(), 0.01) < 0.05


def test_a_rest_is_the_rest_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 seconds of a CPU at a share of 0.999 of it: a tenth of a second more."""
    used = iter([FREE_S + 100, FREE_S + 100])
    monkeypatch.setattr("rayrec.checkpoint.writer.time.thread_time", lambda: next(used))
    pace, began = Throttle(0.999), time.monotonic()
    thread = Thread(target=pace.pause, daemon=True)
    thread.start()
    thread.join(20)
    assert not thread.is_alive() and time.monotonic() - began >= 0.1


def test_a_save_takes_little_of_what_training_needs() -> None:
    """A twentieth of a CPU made steps a tenth longer."""
    assert 0.01 <= SHARE < 0.05 and 0.01 <= FREE_S <= 0.1


def test_a_small_save_does_not_rest() -> None:
    pace, rested = Throttle(1e-6), []

    def run() -> None:
        for _ in range(3):
            work(FREE_S / 4)
            pace.pause()
            rested.append(time.thread_time())

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    assert len(rested) == 3


def test_who_waits_ends_the_rests() -> None:
    pace, began = Throttle(1e-6), Event()

    def run() -> None:
        work(FREE_S + 0.01)
        began.set()
        pace.pause()  # for hours

    thread = Thread(target=run)
    thread.start()
    began.wait()
    pace.release()
    thread.join(20)
    assert not thread.is_alive()
    pace.pause()
    pace.wait(0.001)


def test_what_is_stopped_ends_in_its_rest() -> None:
    pace = Throttle(1e-6)
    pace.stop()
    work(0.001)
    for stopped in (pace.pause, lambda: pace.wait(60)):
        with pytest.raises(StoppedError):
            stopped()


def test_a_save_that_shares_the_cpus_is_hurried_when_it_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rayrec.checkpoint.saving.SHARE", 1e-9)
    monkeypatch.setattr("rayrec.checkpoint.writer.FREE_S", 0.0)
    called: list[str] = []
    job = SaveThread(save_of(LocalFolder(tmp_path), 5, called), during_training=True, shares_cpus=True)
    job.join(0.2)
    assert job.running and called == []
    job.throttle.release()
    job.join(20)
    assert not job.running and job.error is None and called == ["committed"]
    for free in (
        SaveThread(save_of(LocalFolder(tmp_path), 6, called), during_training=True),
        SaveThread(save_of(LocalFolder(tmp_path), 7, called), shares_cpus=True),
    ):
        free.join(20)
        assert not free.running and free.error is None


def test_a_save_in_background_training_gives_way_to_it(tmp_path: Path) -> None:
    found = {}
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for beside in (False, True):

        def look(beside: bool = beside) -> None:
            found[beside] = os.getpriority(os.PRIO_PROCESS, get_native_id())

        job = SaveThread(save_of(LocalFolder(tmp_path), 5, [], may=look), during_training=beside)
        job.join(20)
        assert job.error is None
    assert found[False] == own
    assert found[True] > own or own >= 10


def cached(path: Path) -> float:
    """Which part of a file lies in memory."""
    block, found = bytearray(4096), 0
    with open(path, "rb", buffering=0) as file:
        places = range(0, path.stat().st_size, 1 << 16)
        for place in places:
            with suppress(BlockingIOError):
                found += os.preadv(file.fileno(), [block], place, os.RWF_NOWAIT) == len(block)
    return found / len(places)


def test_bytes_that_were_read_do_not_stay_in_memory(tmp_path: Path) -> None:
    folder, size = LocalFolder(tmp_path), 48 << 20
    with folder.create("data") as file:
        file.write(os.urandom(1 << 20) * (size >> 20))
    try:
        with folder.open("data") as source:
            source.forget(0, size)
        if cached(tmp_path / "data") > 0.1:
            pytest.skip("this file system keeps its files in memory")
    except OSError:
        pytest.skip("this file system does not tell what is in memory")
    block, step = memoryview(bytearray(3_000_000)), 3_000_000  # no multiple of the system's groups of pages
    for forgets in (False, True):
        with folder.open("data") as source:
            for place in range(0, size, step):
                read = source.read_into(place, block)
                if forgets:
                    source.forget(place, read)
        assert cached(tmp_path / "data") < 0.2 if forgets else cached(tmp_path / "data") > 0.9
