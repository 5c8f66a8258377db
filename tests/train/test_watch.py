"""The watch beside a rank: hangs and ranks that wait for each other are noticed, told with their stacks, and ended."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec.distributed.comm import all_gather, broadcast
from rayrec.train.run.log import Mailbox, Record, Waiting
from rayrec.train.worker.watch import EXIT_HUNG, EXIT_UNLIKE, POLL_S, TURN_S, CodeLocation, Watch, location_of
from tests.forked import run_forked
from tests.ranks import on_ranks
from tests.train.small import Heard, Silent

READS_STACKS = """
import gc, threading, time
from rayrec.train.worker.watch import location_of

class Circle:  # is deleted by a garbage collection, with what only its thread has
    def __init__(self):
        self.itself, self.local = self, threading.local()
        self.local.circle = self

def start_threads():
    while time.monotonic() < end:
        thread = threading.Thread(target=Circle)
        thread.start()
        thread.join()

gc.set_threshold(1)
end = time.monotonic() + 3
threads = [threading.Thread(target=start_threads) for _ in range(3)]
for thread in threads:
    thread.start()
while time.monotonic() < end:
    Circle()
    location_of(threading.get_ident())
"""


def test_reading_stacks_stops_no_thread(tmp_path: Path) -> None:
    """As a garbage collection in `sys._current_frames` does in Python 3.11."""
    (tmp_path / "reads.py").write_text(READS_STACKS)
    done = run_forked(tmp_path / "reads.py", tmp_path, os.environ)
    assert done.returncode == 0, done.stderr


def sleeps_in_my_model(seconds: float) -> None:
    threading.Event().wait(seconds)


def test_a_rank_that_does_not_move_tells_its_stacks_and_ends() -> None:
    seen: list[Record] = []
    codes: list[int] = []
    with Watch(Heard(seen.append), 3, 4, hang_s=0.6, end=codes.append) as watch:
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            time.sleep(0.01)
            watch.stop_requested()  # a step
        assert not seen
        sleeps_in_my_model(2.0)
    assert codes and set(codes) == {EXIT_HUNG}
    assert seen[0]["event"] == "hang"
    assert "rank 3 has not moved" in seen[0]["message"]
    assert "sleeps_in_my_model" in seen[0]["stacks"]


def test_the_watch_of_rank_0_hears_of_a_stop() -> None:
    mailbox = Mailbox()
    with Watch(mailbox, 0, 1, hang_s=60, end=None) as watch:
        assert not watch.stop_requested()
        mailbox.request_stop()
        until = time.monotonic() + 120
        while not watch.stop_requested() and time.monotonic() < until:
            time.sleep(0.05)
        assert watch.stop_requested()


class Late(Silent):
    """A driver that does not answer the first time, and then asks for a stop."""

    asked = 0

    def stop_requested(self) -> bool:
        self.asked += 1
        if self.asked == 1:
            raise TimeoutError
        return True


def test_a_driver_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rayrec.train.worker.watch.POLL_S", 0.01)
    before = set(threading.enumerate())  # an earlier test's may be on its way out
    with Watch(Late(), 0, 1, hang_s=60, end=None) as watch:
        (thread,) = (one for one in set(threading.enumerate()) - before if one.name == "rayrec-watch")
        assert thread.daemon, "it keeps no process whose rank has ended"
        until = time.monotonic() + 120
        while not (heard := watch.stop_requested()) and time.monotonic() < until:
            time.sleep(0.001)
        assert heard


class Folder(Silent):
    """What ranks in unlike processes tell each other, in files."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def report_waiting(self, rank: int, place: Waiting | None) -> None:
        mine = self.folder / f"{rank}.json"
        mine.unlink(missing_ok=True)
        if place is not None:
            partial = mine.with_suffix(".part")
            partial.write_text(json.dumps(place))
            partial.replace(mine)

    def waiting_ranks(self) -> dict[int, Waiting]:
        return {int(path.stem): tuple(json.loads(path.read_text())) for path in self.folder.glob("*.json")}

    def flush(self, record: dict[str, Any]) -> None:
        (self.folder / f"told-{record['rank']}").write_text(record["message"])


def skips_an_exchange(group: dist.ProcessGroup, folder: Path) -> None:
    other = dist.new_group(backend="gloo")
    with Watch(Folder(folder), group.rank(), 2, hang_s=600, suspicious_s=1.0):
        if group.rank() == 0:
            all_gather(torch.zeros(3), group)
        broadcast(torch.zeros(2), other, src=1)
        all_gather(torch.zeros(3), group)
        time.sleep(30)


def test_ranks_that_wait_for_each_other_at_unlike_places_end_with_the_places(tmp_path: Path) -> None:
    try:
        on_ranks(2, skips_an_exchange, tmp_path, timeout_s=120)
    except AssertionError as ended:
        assert "died" in str(ended)
    told = [path.read_text() for path in tmp_path.glob("told-*")]
    assert told
    assert "ranks wait in different collectives: rank 0 in " in told[0]
    assert "skips_an_exchange" in told[0]


@pytest.mark.parametrize(
    ("modules", "waits"), [(["user", "torch.distributed.a"], True), (["torch.distributed.a", "user"], False)]
)
def test_a_rank_waits_in_an_exchange_where_its_innermost_call_is_one(modules: list[str], waits: bool) -> None:
    """Not where an exchange has called something else."""
    call: Callable[[], None] = partial(time.sleep, 0.5)
    for module in reversed(modules):
        names: dict[str, Any] = {"__name__": module, "call": call}
        exec("def run():\n    call()", names)
        call = names["run"]
    thread = threading.Thread(target=call)
    thread.start()
    time.sleep(0.1)
    assert thread.ident is not None
    place = location_of(thread.ident)
    thread.join()
    assert (place.in_exchange, place.line) == (waits, "user.run, line 2")


class Peers(Silent):
    """What a watch hears of the others, and what it tells."""

    def __init__(self, others: dict[int, Waiting]) -> None:
        super().__init__()
        self.others, self.stops, self.told = others, 0, []  # type: ignore[var-annotated]
        self.mine: dict[int, Waiting] = {}
        self.asked = 0

    def stop_requested(self) -> bool:
        self.stops += 1
        return True

    def report_waiting(self, rank: int, place: Waiting | None) -> None:
        self.told.append(place)
        self.mine = {} if place is None else {rank: place}

    def waiting_ranks(self) -> dict[int, Waiting]:
        self.asked += 1
        return {**self.others, **self.mine}


WAITS, WORKS = CodeLocation("here", ((1, 2),), True), CodeLocation("here", ((1, 2),), False)


def test_unlike_places_are_told_when_they_are_seen_twice() -> None:
    gone_on = (1, "there")  # to the next exchange, while this rank still receives
    for others, unlike in [({1: (0, "there")}, True), ({1: (0, "here")}, False), ({1: gone_on}, False), ({}, False)]:
        ended: list[int] = []
        peers = Peers(others)
        watch = Watch(peers, 0, 2, hang_s=60, suspicious_s=1.0, end=ended.append)
        watch._check(WAITS, 2.0)
        assert not ended
        watch._check(WAITS, 2.5)
        assert ended == ([EXIT_UNLIKE] if unlike else [])
        if unlike:
            text = peers.records[0]["message"]
            assert "collectives: rank 0 in here; rank 1 in there. A model" in text and peers.records[0]["rank"] == 0
            assert peers.records[0]["kind"] == "event", "another attempt may end otherwise"
    moves = Peers({1: (0, "there")})
    watch = Watch(moves, 0, 2, hang_s=60, suspicious_s=1.0, end=None)
    for number in range(4):
        moves.others = {1: (0, f"line {number}")}
        watch._check(WAITS, 2.0)
    assert not moves.records, "something moves"
    watch = Watch(peers := Peers({1: (0, "there")}), 1, 2, hang_s=60, suspicious_s=1.0, end=None)
    for place, still_s in [(WORKS, 9.0), (WAITS, 1.0)]:
        watch._check(place, still_s)
    assert peers.told == [] and peers.stops == 0, "only rank 0 asks, and only who waits for long tells"
    for place, still_s in [(WAITS, 1.1), (WORKS, 9.0), (WORKS, 9.0), (WAITS, 1.1)]:
        watch._check(place, still_s)
    assert peers.told == [(0, "here"), None, (0, "here")], "that it goes on is told once"
    assert not peers.records, "the two times did not follow each other"
    assert peers.asked == 0, "rank 0 asks for all reports"
    first = Watch(peers, 0, 2, hang_s=60, end=None)
    first._check(WORKS, 0.0)
    first._check(WORKS, 0.0)
    assert peers.stops == 1 and first.stop_requested(), "asked until it is so"


class Counted(Mailbox):
    """A mailbox that counts the reports, and the questions for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.reports = self.questions = 0

    def report_waiting(self, rank: int, waiting: Waiting | None) -> None:
        self.reports += 1
        super().report_waiting(rank, waiting)

    def waiting_ranks(self) -> dict[int, Waiting]:
        self.questions += 1
        return super().waiting_ranks()


@settings(max_examples=25)
@given(world_size=st.integers(5, 50), silent=st.sets(st.integers(0, 3)))
def test_one_rank_asks_who_waits_and_the_next_where_it_is_silent(world_size: int, silent: set[int]) -> None:
    """`silent`: ranks whose watch stops after its first report."""
    box, told = Counted(), list[int]()
    watches = {
        rank: Watch(box, rank, world_size, hang_s=1e9, suspicious_s=5.0, end=lambda _, rank=rank: told.append(rank))
        for rank in range(world_size)
    }
    watches[0]._stop.set()  # rank 0 also asks for stops, until it hears of one
    elsewhere = CodeLocation("there", ((1, 2),), True)
    first = min(set(range(world_size)) - silent)
    for poll in range(int((10.0 + (first + 1) * TURN_S) / POLL_S)):
        questions = box.questions
        for rank, watch in list(watches.items()):
            watch._check(elsewhere if rank == 1 else WAITS, poll * POLL_S)
            if rank in silent and box.reports:
                del watches[rank]
        assert box.questions - questions <= 1
        if told:
            break
    assert told == [first]
    assert box.reports <= world_size * (first + 1)


SLEEPS = "import time\ndef sleep(stop):\n    while not stop.is_set():\n        time.sleep(0.01)\n"


@pytest.mark.parametrize(("module", "waits"), [("torch.distributed.x", True), ("rayrec.distributed.x", False)])
def test_a_thread_waits_where_its_innermost_line_is_an_exchange(module: str, waits: bool) -> None:
    names: dict[str, Any] = {"__name__": module}
    exec(SLEEPS, names)
    stop = threading.Event()
    thread = threading.Thread(target=names["sleep"], args=(stop,))
    thread.start()
    assert thread.ident is not None
    until = time.monotonic() + 120
    while not (found := location_of(thread.ident)).line.startswith("threading.run" if waits else module):
        assert time.monotonic() < until
    place = location_of(thread.ident)
    stop.set()
    thread.join()
    assert found.in_exchange == waits
    assert place.line.rpartition(",")[0] == ("threading.run" if waits else f"{module}.sleep")
    assert location_of(-1) == CodeLocation("", (), False)
