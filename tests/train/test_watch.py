"""The watch beside a rank: hangs and ranks that wait for each other are noticed, told with their stacks, and ended."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.distributed.comm import all_gather, broadcast
from rayrec.train.run.log import Mailbox, Record, Waiting
from rayrec.train.worker.watch import EXIT_HUNG, Watch, location_of
from tests.ranks import on_ranks
from tests.train.small import Heard, Silent


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
        until = time.monotonic() + 10
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
        until = time.monotonic() + 10
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
