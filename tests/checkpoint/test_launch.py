"""Who holds a folder of checkpoints: launches on one machine and on several, that go on, have ended, or were killed."""

from __future__ import annotations

import itertools
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from rayrec.checkpoint import FencedError, TakenOverError, ownership
from rayrec.checkpoint.errors import InUseError, NotSharedError
from rayrec.checkpoint.ownership import (
    LAUNCH_FILE,
    Attempt,
    Launch,
    Lease,
    Timing,
    await_end,
    current_launch,
    folder_name,
    request_stop,
    stop_requested,
)
from rayrec.storage import LocalFolder, open_folder


@pytest.fixture
def root(tmp_path: Path) -> LocalFolder:
    return LocalFolder(tmp_path / "checkpoints")


QUICK = Timing(heartbeat_s=0.05, dead_s=0.4, silent_s=0.2)


def left_behind(root: LocalFolder, beat: float | None = None, **changes: object) -> Launch:
    """The file of a launch that writes it no more."""
    launch = replace(Launch.here(), **changes)  # type: ignore[arg-type]
    beat = time.time() if beat is None else beat
    root.write(LAUNCH_FILE, json.dumps({"launch": asdict(launch), "beat": beat}).encode())
    return launch


def test_a_folder_is_tokens_here_until_its_launch_ends(root: LocalFolder) -> None:
    assert current_launch(root) is None
    with Lease(root).take() as first:
        assert first.held and current_launch(root) == first.launch
        with pytest.raises(InUseError, match=rf"in use by a run that is still going \(process {os.getpid()} on "):
            Lease(root).take()
        assert first.held
    assert root.names() == []
    with Lease(root).take() as second:
        assert second.held and not first.held


def test_a_launch_of_another_machine_is_known_by_its_beat(root: LocalFolder) -> None:
    told: list[str] = []
    other = Lease(root, timing=QUICK)
    other.launch = replace(other.launch, host="elsewhere")
    other.take()
    ownership._tokens_here.clear()  # nor is it of this process
    with other:
        with pytest.raises(InUseError, match=r"\(process \d+ on elsewhere, started 20.* UTC\); wait for it, stop it"):
            Lease(root, told.append, replace(QUICK, dead_s=10.0)).take()
        assert other.held
    assert len(told) == 1 and "Another driver (process " in told[0] and "to see whether it is alive" in told[0]


def test_a_launch_without_a_beat_is_over(root: LocalFolder) -> None:
    left_behind(root, host="elsewhere")
    began = time.monotonic()
    with Lease(root, timing=QUICK).take() as lease:
        assert lease.held and time.monotonic() - began >= QUICK.dead_s


def test_a_launch_whose_clock_is_31_minutes_behind_is_alive(root: LocalFolder) -> None:
    stopped = threading.Event()

    def send(beat: int) -> None:
        left_behind(root, host="elsewhere", token="behind", beat=time.time() - 31 * 60 + beat)

    def beats() -> None:
        for beat in itertools.count():
            if stopped.wait(0.05):
                return
            send(beat)

    send(0)
    thread = threading.Thread(target=beats)
    thread.start()
    told: list[str] = []
    try:
        with pytest.raises(InUseError, match="on elsewhere"):
            Lease(root, told.append, replace(QUICK, silent_s=10.0)).take()
    finally:
        stopped.set()
        thread.join()
    assert "Waiting up to 10 s" in told[0], "a shorter wait than for a recent heartbeat"
    with Lease(root, timing=QUICK).take() as lease:
        assert lease.held, "it has sent no heartbeat meanwhile"


@pytest.mark.parametrize("why", ["its process has ended", "of an earlier process with this number"])
def test_a_launch_that_is_known_to_be_over_is_not_waited_for(root: LocalFolder, why: str) -> None:
    if why == "its process has ended":
        ended = subprocess.Popen([sys.executable, "-c", ""])
        ended.wait()
        left_behind(root, pid=ended.pid)
    else:
        left_behind(root)
    began = time.monotonic()
    with Lease(root).take() as lease:
        assert lease.held and time.monotonic() - began < 40


def test_a_launch_that_was_taken_over_leaves_the_file_alone(root: LocalFolder) -> None:
    with Lease(root, timing=QUICK).take() as lease:
        other = left_behind(root, host="elsewhere")
        time.sleep(4 * QUICK.heartbeat_s)
        assert not lease.held
    assert current_launch(root) == other
    root.write(LAUNCH_FILE, b'{"launch": {"token": 1}}')
    assert current_launch(root) is None, "not whole: nobody's"


class Hanging(LocalFolder):
    """Reads wait until `gate` is set."""

    gate: threading.Event

    def read(self, name: str) -> bytes:
        self.gate.wait(60)
        return super().read(name)


def test_the_end_of_a_launch_does_not_wait_for_storage_that_hangs(root: LocalFolder) -> None:
    storage = Hanging(Path(root.path))
    storage.gate = threading.Event()
    storage.gate.set()
    with Lease(storage, timing=Timing(release_s=0.1)).take():
        storage.gate.clear()
        began = time.monotonic()
    assert time.monotonic() - began < 40
    with Lease(root).take() as lease:
        assert lease.held, "the file that was left is known to be over"
        storage.gate.set()


def test_a_launch_is_asked_to_stop_and_the_next_one_is_not(root: LocalFolder) -> None:
    assert request_stop(root) is None
    with Lease(root).take() as lease:
        assert not stop_requested(root, lease.launch)
        assert request_stop(root) == lease.launch
        assert stop_requested(root, lease.launch)
        assert not await_end(root, lease.launch, within_s=0)
        killed = lease.launch
        ending = threading.Thread(target=lease.__exit__, name="ending")
        ending.start()
        assert await_end(root, lease.launch, within_s=60)
        ending.join()
    root.write("stop.json", json.dumps({"token": killed.token}).encode())  # of a driver that was killed
    with Lease(root).take() as lease:
        assert not stop_requested(root, lease.launch)
    root.write("stop.json", b"{")
    assert not stop_requested(root, killed)


def test_a_launch_that_does_not_answer_is_named(root: LocalFolder) -> None:
    silent = left_behind(root, host="elsewhere")
    assert request_stop(root) == silent
    with pytest.raises(TimeoutError, match=r"no heartbeat of process \d+ on elsewhere"):
        await_end(root, silent, within_s=60, timing=QUICK)
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    left_behind(root, pid=ended.pid)
    assert request_stop(root) is None, "its process has ended"


def test_an_attempt_is_of_the_launch_that_holds_the_folder(root: LocalFolder) -> None:
    mine = Launch.here()
    with pytest.raises(NotSharedError, match=r"launch\.json, which the driver on .* for 0 s.* set storage\.path to"):
        Attempt.claim(root, mine, within_s=0)
    root.write(LAUNCH_FILE, json.dumps({"launch": asdict(mine), "beat": 0.0}).encode())
    attempt = Attempt.claim(root, mine)
    attempt.check(root)
    other = left_behind(root, host="elsewhere", token="other")
    attempt.check(root)  # until that launch has workers too
    with pytest.raises(TakenOverError, match=r"another driver \(process \d+ on elsewhere, star"):
        Attempt.claim(root, mine)
    Attempt.claim(root, other)
    with pytest.raises(TakenOverError, match="on elsewhere") as caught:
        attempt.check(root)
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_an_attempt_is_numbered_after_all_that_came_before(root: LocalFolder) -> None:
    with pytest.raises(FencedError, match="belongs to attempt 0 of the run; attempt 3"):
        Attempt(3, "x").check(root)  # nobody's
    first = Attempt.claim(root)
    assert first.number == 1
    first.check(root)
    second = Attempt.claim(root)
    assert second.number == 2 and second.token != first.token
    with pytest.raises(FencedError, match="belongs to attempt 2 of the run; attempt 1 may no longer"):
        first.check(root)
    root.remove("attempt.json")
    root.sub(folder_name(4, 6)).write("data", b"")
    assert Attempt.claim(root).number == 7
    root.write("attempt.json", b'{"attempt": 12}')  # not whole: what folders say holds
    assert Attempt.claim(root).number == 7
    root.write("attempt.json", b'{"attempt": 12, "token": "x"}')
    assert Attempt.claim(root).number == 13


def test_attempts_of_one_launch_fence_each_other(root: LocalFolder) -> None:
    mine = left_behind(root)
    first = Attempt.claim(root, mine)
    Attempt.claim(root, mine)
    with pytest.raises(FencedError, match="belongs to attempt 2") as caught:
        first.check(root)
    assert not isinstance(caught.value, TakenOverError)
    root.write("attempt.json", b'{"attempt": 7, "token": "as written before launches"}')
    assert Attempt.claim(root, mine).number == 8


@pytest.mark.parametrize("kind", ["path", "uri"])
def test_writers_of_one_small_file_do_not_disturb_each_other(tmp_path: Path, kind: str) -> None:
    folder = open_folder(tmp_path if kind == "path" else f"file://{tmp_path}")
    errors: list[Exception] = []

    def write(number: int) -> None:
        try:
            for _ in range(30):
                folder.write("attempt.json", json.dumps([number] * 100).encode())
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors and folder.names() == ["attempt.json"]
    assert len(set(json.loads(folder.read("attempt.json")))) == 1
