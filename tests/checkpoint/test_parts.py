"""Decisions of the checkpoint store without a model: what stays, what is awaited, and the pace of a save."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event, Thread, get_native_id
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec._runtime.cgroup_limits import available_bytes
from rayrec.checkpoint import Best, CheckpointError, CheckpointStore, FencedError
from rayrec.checkpoint.manifest import Manifest
from rayrec.checkpoint.ownership import folder_name
from rayrec.checkpoint.rectangles import Rectangles
from rayrec.checkpoint.save_plan import Work
from rayrec.checkpoint.saving import BackgroundSave, Save, SaveThread, fits_in_memory
from rayrec.checkpoint.writer import FREE_S, Item, StoppedError, Throttle
from rayrec.storage import ArrowFolder, Folder, LocalFolder
from tests.ranks import on_ranks


def manifest(step: int = 1, attempt: int = 1, world_size: int = 1) -> Manifest:
    told: Any = {"time": 0.0, "iteration": 0, "plan": {}, "mapping": None, "extra": {}}
    return Manifest(step=step, attempt=attempt, world_size=world_size, **told)


def kept_of(orders: list[tuple[int, int]], whole: set[tuple[int, int]], keep: int, best: Any) -> list[tuple[int, int]]:
    """What thinning out leaves, told in the plainest way."""
    orders = sorted(orders)
    committed = [order for order in orders if order in whole]
    stay = set(committed[len(committed) - max(keep, 1) :] if len(committed) > max(keep, 1) else committed)
    stay.update(best)
    return [order for order in orders if order in stay or not committed or order > committed[-1]]


@settings(max_examples=25)
@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(0, 12), st.booleans(), st.integers(0, 4)), max_size=7),
    st.integers(0, 3),
    st.sampled_from([None, True, False]),
    st.integers(1, 3),
)
def test_the_newest_the_best_and_what_is_newer_than_all_stay(
    tmp_path_factory: pytest.TempPathFactory, made: Any, keep: int, larger: bool | None, count: int
) -> None:
    folder = LocalFolder(tmp_path_factory.mktemp("root"))
    values: dict[tuple[int, int], int] = {}
    whole = set()
    for attempt, step, committed, value in made:
        name, order = folder_name(step, attempt), (attempt, step)
        folder.sub(name).write("data", b"")
        if committed:
            folder.sub(name).write("manifest.json", manifest(step, attempt).to_json())
            whole.add(order)
        if value:  # 0: never scored
            values[order] = value
    scores = {folder_name(step, attempt): {"m": value} for (attempt, step), value in values.items()}
    folder.write("scores.json", json.dumps(scores).encode())
    orders = list({(attempt, step) for attempt, step, _, _ in made})
    scored = sorted(order for order in whole if order in values)
    best: list[tuple[int, int]] = []
    while larger is not None and scored and len(best) < count:
        wanted = (max if larger else min)(values[order] for order in scored)
        best.append(next(order for order in scored if values[order] == wanted))  # the earliest of equally good ones
        scored.remove(best[-1])
    make_old(folder)
    store = CheckpointStore(folder, keep, None if larger is None else Best("m", larger, count))
    assert [(found.manifest.attempt, found.step) for found in store.all()] == sorted(whole)
    store.prune(keep)
    left = sorted(order for order in orders if folder_name(order[1], order[0]) in folder.names())
    assert left == kept_of(orders, whole, keep, best)
    assert {(found.manifest.attempt, found.step) for found in store.all()} == whole & set(left)


def steps_in(root: LocalFolder) -> list[str]:
    return [name for name in root.names() if name.startswith("step_")]


def make_old(root: LocalFolder) -> None:
    """Make the folders of checkpoints two minutes older than the newest file."""
    root.write("launch.json", b"{}")
    for name in steps_in(root):
        then = Path(root.path, "launch.json").stat().st_mtime - 120
        os.utime(Path(root.path, name), (then, then))


class StaleListing(LocalFolder):
    """As an NFS client lists a folder in which another machine has just written the manifest."""

    def sub(self, name: str) -> StaleListing:
        return StaleListing(Path(self.path) / name)

    def names(self) -> list[str]:
        return [name for name in super().names() if name != "manifest.json"]


@pytest.mark.parametrize("keep", [1, 3])
def test_a_manifest_that_is_not_listed_yet_keeps_its_checkpoint(tmp_path: Path, keep: int) -> None:
    root = StaleListing(tmp_path)
    for step in (1, 2, 3):
        root.sub(folder_name(step, 1)).write("manifest.json", manifest(step).to_json())
    make_old(root)
    store = CheckpointStore(root)
    store.claim()
    assert len(steps_in(root)) == 3
    store.prune(keep)
    assert steps_in(root) == [folder_name(step, 1) for step in (1, 2, 3)[-keep:]]


def test_unfinished_folders_of_the_last_minute_are_left_until_they_are_older(tmp_path: Path) -> None:
    root = LocalFolder(tmp_path)
    root.sub(folder_name(1, 1)).write("data", b"")
    root.sub(folder_name(2, 1)).write("manifest.json", manifest(2).to_json())
    store = CheckpointStore(root)
    store.claim()
    store.prune(1)
    assert len(steps_in(root)) == 2, "whatever this machine's clock says"
    make_old(root)
    store.claim()
    assert steps_in(root) == [folder_name(2, 1)]


def test_nothing_is_removed_where_it_is_not_known_which_is_the_best(tmp_path: Path) -> None:
    root = LocalFolder(tmp_path)
    for step in (1, 2):
        root.sub(folder_name(step, 1)).write("manifest.json", manifest(step).to_json())
    root.write("scores.json", b"{")
    store = CheckpointStore(root, keep=1, best=Best("m", larger=True))
    with pytest.raises(CheckpointError, match=r"scores\.json is damaged, .* none is removed\. Delete"):
        store.prune(1)
    assert [found.step for found in store.all()] == [1, 2]


def save_of(
    root: Folder,
    step: int,
    called: list[str],
    may: Any = lambda: None,
    world_size: int = 1,
    items: Sequence[Item] = (Item("dense/a", (3,), (0,), torch.ones(3)),),
) -> Save:
    return Save(
        folder=root.sub(folder_name(step, 1)),
        rank=0,
        work=Work(list(items), frozenset(item.key for item in items)),
        manifest=manifest(step, world_size=world_size),
        may_commit=may,
        committed=lambda _: called.append("committed"),
    )


def copies_fit(group: dist.ProcessGroup, share: float) -> tuple[bool, bool]:
    """Whether copies of this share of the free memory fit, where each rank makes them, and where one rank does."""
    need = int(share * available_bytes())
    return fits_in_memory(need, group), fits_in_memory(need if group.rank() else 0, group)


def test_ranks_of_a_host_share_its_memory() -> None:
    assert on_ranks(2, copies_fit, 0.6) == [(False, True)] * 2
    assert on_ranks(2, copies_fit, 0.2) == [(True, True)] * 2


class Together(ArrowFolder):
    """A folder far away, in which reading goes on only once `barrier.parties` files are read at the same time."""

    barrier = Barrier(4, timeout=180)

    def sub(self, name: str) -> ArrowFolder:
        return Together(self._files, f"{self._inner}/{name}", f"{self._uri}/{name}")

    def read(self, name: str) -> bytes:
        if name.startswith("part-"):
            self.barrier.wait()
        return super().read(name)

    @contextmanager
    def open(self, name: str) -> Any:
        self.barrier.wait()
        with super().open(name) as source:
            yield source


def test_files_far_away_are_read_side_by_side(tmp_path: Path) -> None:
    """The ranks' parts of the index in a commit, and their data files in a restore."""
    world_size = Together.barrier.parties
    root = Together(pafs.LocalFileSystem(), str(tmp_path), f"x:/{tmp_path}")
    keys = frozenset(f"dense/{rank}" for rank in range(world_size))
    for rank in reversed(range(world_size)):
        items = [Item(f"dense/{rank}", (3,), (0,), torch.full((3,), float(rank)))]
        save = replace(save_of(root, 5, [], world_size=world_size), rank=rank, work=Work(items, keys))
        save.run(Throttle())
    names = sorted(save.folder.names())
    assert names == [*(f"data-{rank:05d}.safetensors" for rank in range(world_size)), "index.json", "manifest.json"]
    store = CheckpointStore(root)
    checkpoint = store.latest()
    assert checkpoint is not None
    state = {key: torch.empty(3) for key in keys}
    with store.reader(checkpoint) as reader:
        reader.fill({key: Rectangles.whole(tensor) for key, tensor in state.items()})
    assert {key: tensor.tolist() for key, tensor in state.items()} == {key: [float(key[-1])] * 3 for key in keys}


def test_a_save_is_timed_and_told_once(tmp_path: Path) -> None:
    root, called, under = LocalFolder(tmp_path), [], BackgroundSave()  # type: ignore[var-annotated]
    assert not under.running and under.wait(None) and under.ended() == []
    gate = Event()
    before = time.monotonic()
    under.start(save_of(root, 5, called, may=lambda: gate.wait(120)), during_training=True)
    assert under.running and under.ended() == []
    assert not under.wait(None, patience_s=1.0)
    again = time.monotonic()
    assert not under.wait(None, patience_s=1.0) and time.monotonic() - again < 0.9, "it was waited for already"
    gate.set()
    assert under.wait(None) and not under.running
    (outcome,) = under.ended()
    assert (outcome.step, outcome.error, called) == (5, None, ["committed"])
    assert 0.05 <= outcome.seconds <= time.monotonic() - before
    assert under.ended() == []
    assert sorted(root.sub(folder_name(5, 1)).names()) == ["data-00000.safetensors", "index.json", "manifest.json"]
    assert CheckpointStore(root).latest() is not None


def test_what_a_failed_save_left_is_removed_unless_it_is_fenced(tmp_path: Path) -> None:
    def refuse(error: Exception) -> Any:
        return lambda: (_ for _ in ()).throw(error)

    root, called, under = LocalFolder(tmp_path), [], BackgroundSave()  # type: ignore[var-annotated]
    full = OSError("full")
    under.start(save_of(root, 5, called, refuse(full)), during_training=False)
    assert under.wait(None)
    assert [(outcome.step, outcome.error) for outcome in under.ended()] == [(5, full)]
    assert root.names() == [] and called == []
    under.start(save_of(root, 6, called, refuse(FencedError("another's"))), during_training=False)
    with pytest.raises(FencedError):
        under.wait(None)
    assert root.names() == [folder_name(6, 1)]  # another attempt's to remove
    assert [type(outcome.error) for outcome in under.ended()] == [FencedError]


class Unremovable(LocalFolder):
    """Its checkpoints are removed only when `gate` is set."""

    gate = Event()

    def sub(self, name: str) -> Unremovable:
        return Unremovable(self._path / name)

    def remove_all(self) -> None:
        if self.name != "parts":
            self.gate.wait(60)
        super().remove_all()


def test_nobody_waits_for_a_removal_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    under = BackgroundSave()
    monkeypatch.setattr("rayrec.checkpoint.saving.REMOVAL_S", 0.05)
    under.start(save_of(Unremovable(tmp_path), 5, [], may=lambda: 1 // 0))
    began = time.monotonic()
    assert under.wait(None) and time.monotonic() - began < 40
    Unremovable.gate.set()
    assert [type(outcome.error) for outcome in under.ended()] == [ZeroDivisionError]


@pytest.mark.parametrize("lost_peer", [False, True])
def test_a_save_that_waits_for_others_in_vain_can_be_given_up(tmp_path: Path, lost_peer: bool) -> None:
    """Before its time, if another rank has died."""
    under = BackgroundSave()
    under.start(save_of(LocalFolder(tmp_path), 5, [], world_size=2), during_training=True)
    under.close(3600.0 if lost_peer else 0.05, lost_peer)
    assert under.wait(None)
    (outcome,) = under.ended()
    assert type(outcome.error).__name__ == "StoppedError"
    under.close(0.0)


def test_a_lost_rank_does_not_end_a_save_that_still_writes(tmp_path: Path) -> None:
    under, gate, called = BackgroundSave(), Event(), list[str]()
    under.start(save_of(LocalFolder(tmp_path), 5, called, may=lambda: gate.wait(60)), during_training=True)
    closing = Thread(target=under.close, args=(60.0, True))
    closing.start()
    closing.join(0.3)
    assert closing.is_alive()
    gate.set()
    closing.join(60)
    assert called == ["committed"] and [outcome.error for outcome in under.ended()] == [None]


def test_a_commit_without_all_planned_tensors_is_none(tmp_path: Path) -> None:
    save = save_of(LocalFolder(tmp_path), 5, [])
    short = replace(save, work=Work(save.work.items, frozenset({"x"})))
    assert save.copy_bytes == 12 and save.copied().work.keys == save.work.keys
    with pytest.raises(ValueError, match="wrote other tensors than planned"):
        short.run(Throttle())
    assert "manifest.json" not in save.folder.names()


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


def test_a_small_save_does_not_rest() -> None:
    pace, rested = Throttle(1e-6), []

    def run() -> None:
        for _ in range(3):
            work(FREE_S / 4)
            pace.pause()
            rested.append(time.thread_time())

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(120)
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
    thread.join(120)
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


class Busy(LocalFolder):
    """Opening a file takes a tenth of a second of a CPU."""

    def sub(self, name: str) -> Busy:
        return Busy(self._path / name)

    @contextmanager
    def create(self, name: str) -> Any:
        work(0.1)
        with super().create(name) as file:
            yield file


def test_a_save_that_shares_the_cpus_is_hurried_when_it_is_waited_for(tmp_path: Path) -> None:
    """It would rest for 3 s after its first file."""
    called: list[str] = []
    job = SaveThread(save_of(Busy(tmp_path), 5, called), during_training=True, shares_cpus=True)
    job.join(0.7)
    assert job.running and called == []
    job.throttle.release()
    job.join(120)
    assert not job.running and job.error is None and called == ["committed"]
    assert job.seconds < 5
    for step, settings_ in ((6, {"during_training": True}), (7, {"shares_cpus": True})):
        free = SaveThread(save_of(Busy(tmp_path), step, called), **settings_)
        free.join(120)
        assert not free.running and free.error is None and free.seconds < 5


def test_a_save_in_background_training_gives_way_to_it(tmp_path: Path) -> None:
    found = {}
    own = os.getpriority(os.PRIO_PROCESS, 0)
    for beside in (False, True):

        def look(beside: bool = beside) -> None:
            found[beside] = os.getpriority(os.PRIO_PROCESS, get_native_id())

        job = SaveThread(save_of(LocalFolder(tmp_path), 5, [], may=look), during_training=beside)
        job.join(120)
        assert job.error is None
    assert found[False] == own
    assert found[True] > own or own >= 10
