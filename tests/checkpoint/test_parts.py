"""Decisions of the checkpoint store without a model: who owns a folder, what stays, what is awaited, what fits."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path
from threading import Barrier, Event
from types import SimpleNamespace
from typing import Any

import pyarrow.fs as pafs
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rayrec._runtime.cgroup_limits import available_bytes
from rayrec.checkpoint import Best, CheckpointError, CheckpointStore, DamagedCheckpointError, FencedError, saving
from rayrec.checkpoint.errors import Damage, DamagedScoresError
from rayrec.checkpoint.manifest import MANIFEST, Manifest
from rayrec.checkpoint.ownership import Attempt, folder_name, order_of
from rayrec.checkpoint.polling import FIRST_POLL_S, LONGEST_POLL_S, deadline, on_every_rank
from rayrec.checkpoint.rectangles import Rectangles
from rayrec.checkpoint.retention import best_of, note_scores, read_scores, remove_old, remove_unfinished
from rayrec.checkpoint.save_plan import Work
from rayrec.checkpoint.saving import BackgroundSave, Save, _fit, copy_bytes, fits_in_memory
from rayrec.checkpoint.tools import store_of
from rayrec.checkpoint.writer import Item, Throttle
from rayrec.storage.folder import ArrowFolder, Folder, LocalFolder, open_folder
from rayrec.storage.retries import waits_s

CPU = torch.device("cpu")


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


@settings(max_examples=25, deadline=None)
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
            folder.sub(name).write(MANIFEST, manifest(step, attempt).to_json())
            whole.add(order)
        if value:  # 0: never scored
            values[order] = value
            note_scores(folder, name, {"m": value})
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
    left = sorted(order for name in folder.names() if (order := order_of(name)))
    assert left == kept_of(orders, whole, keep, best)
    assert {(found.manifest.attempt, found.step) for found in store.all()} == whole & set(left)


def make_old(root: LocalFolder) -> None:
    """Make the folders of checkpoints two minutes older than the newest file."""
    root.write("launch.json", b"{}")
    for name in filter(order_of, root.names()):
        then = Path(root.path, "launch.json").stat().st_mtime - 120
        os.utime(Path(root.path, name), (then, then))


class StaleListing(LocalFolder):
    """As an NFS client lists a folder in which another machine has just written the manifest."""

    def sub(self, name: str) -> StaleListing:
        return StaleListing(Path(self.path) / name)

    def names(self) -> list[str]:
        return [name for name in super().names() if name != MANIFEST]


@pytest.mark.parametrize("keep", [1, 3])
def test_a_manifest_that_is_not_listed_yet_keeps_its_checkpoint(tmp_path: Path, keep: int) -> None:
    root = StaleListing(tmp_path)
    for step in (1, 2, 3):
        root.sub(folder_name(step, 1)).write(MANIFEST, manifest(step).to_json())
    make_old(root)
    remove_unfinished(root)
    assert len(root.names()) == 4
    remove_old(root, keep, None)
    assert list(filter(order_of, root.names())) == [folder_name(step, 1) for step in (1, 2, 3)[-keep:]]


def test_unfinished_folders_of_the_last_minute_are_left_until_they_are_older(tmp_path: Path) -> None:
    root = LocalFolder(tmp_path)
    root.sub(folder_name(1, 1)).write("data", b"")
    root.sub(folder_name(2, 1)).write(MANIFEST, manifest(2).to_json())
    before = root.names()
    remove_unfinished(root)
    remove_old(root, 1, None)
    assert root.names() == before, "whatever this machine's clock says"
    make_old(root)
    remove_unfinished(root)
    assert root.names() == ["launch.json", folder_name(2, 1)]


def test_a_later_attempt_is_newer_whatever_its_step() -> None:
    names = ["step_00000009-0001", "step_00000002-0002", "step_00000005", "step_123456789-0001", "step_00000001-12345"]
    assert sorted(names, key=lambda name: order_of(name) or (-1, -1)) == [names[n] for n in (2, 0, 3, 1, 4)]
    assert [order_of(name) for name in ("step_0000001-0001", "step_00000001-001", "xstep_00000001-0001", "run")] == [
        None
    ] * 4
    assert order_of(folder_name(7, 3)) == (3, 7) and folder_name(7, 3) == "step_00000007-0003"
    assert order_of("step_00000005") == (0, 5), "of no attempt: before all"


def test_an_attempt_is_numbered_after_all_that_came_before(tmp_path: Path) -> None:
    root = LocalFolder(tmp_path / "root")
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


def test_scores_are_of_finite_numbers_only(tmp_path: Path) -> None:
    root = LocalFolder(tmp_path)
    assert read_scores(root) == {}
    for name in "abc":
        root.sub(name).write("data", b"")
    note_scores(root, "a", {"m": 1, "of": {"x": 2}, "words": "no"})
    note_scores(root, "b", {"m": float("inf")})
    note_scores(root, "c", {"other": 3.0})
    assert read_scores(root) == {"a": {"m": 1}, "b": {"m": float("inf")}, "c": {"other": 3.0}}
    assert best_of(root, "abc", Best("m", larger=True)) == best_of(root, "abc", Best("m", larger=False)) == "a"
    assert best_of(root, "bc", Best("m", larger=True)) is None
    root.sub("a").remove_all()
    note_scores(root, "d", {"m": 2})
    assert read_scores(root) == {"b": {"m": float("inf")}, "c": {"other": 3.0}, "d": {"m": 2}}, (
        "what is gone needs none"
    )
    for damaged in (b"[1]", b"{"):
        root.write("scores.json", damaged)
        with pytest.raises(DamagedScoresError, match=r"scores\.json is damaged, .* none is removed\. Delete"):
            read_scores(root)


def test_nothing_is_removed_where_it_is_not_known_which_is_the_best(tmp_path: Path) -> None:
    root = LocalFolder(tmp_path)
    for step in (1, 2):
        root.sub(folder_name(step, 1)).write(MANIFEST, manifest(step).to_json())
    root.write("scores.json", b"{")
    store = CheckpointStore(root, keep=1, best=Best("m", larger=True))
    with pytest.raises(DamagedScoresError):
        store.prune(1)
    assert [found.step for found in store.all()] == [1, 2]


FILES = [("local", ""), ("arrow", ""), ("arrow", "?region=x")]


@pytest.mark.parametrize("kind, options", FILES)
def test_a_folder_anywhere_holds_whole_files(tmp_path: Path, kind: str, options: str) -> None:
    inner = f"{tmp_path}/run/root"
    folder: Folder = LocalFolder(Path(inner))
    if kind == "arrow":
        folder = ArrowFolder(pafs.LocalFileSystem(), inner, f"x:/{inner}/{options}")
    assert folder.remote == (kind == "arrow") and folder.name == "root"
    assert folder.names() == []
    below = folder.sub("a")
    assert (below.name, below.parent().name, below.parent().parent().name) == ("a", "root", "run")
    prefix = "" if kind == "local" else "x:/"
    assert below.path == f"{prefix}{inner}/a{options}" and below.parent().path == f"{prefix}{inner}{options}"
    below.write("one", b"first, and long")
    below.write("one", b"12345")
    with below.create("two") as file:
        file.write(b"0123456789")
        file.write(memoryview(b"abc"))
    assert below.names() == ["one", "two"] and folder.names() == ["a"]
    assert below.read("one") == b"12345"
    with below.open("two") as source:
        room = bytearray(b"....")
        assert source.read_into(8, memoryview(room)) == 4 and room == b"89ab"
        assert source.read_into(11, memoryview(room)) == 2 and room == b"bcab"
        assert source.read_into(13, memoryview(room)) == 0
    for missing in (lambda: below.read("three"), lambda: below.open("three").__enter__()):
        with pytest.raises(FileNotFoundError):
            missing()
    below.remove("one")
    below.remove("one")
    assert below.names() == ["two"]
    below.remove_all()
    below.remove_all()
    assert below.names() == [] and folder.names() == []


def test_a_place_is_a_path_or_a_uri(tmp_path: Path) -> None:
    assert open_folder(tmp_path).path == open_folder(f"file://{tmp_path}").path == str(tmp_path)
    assert open_folder(folder := LocalFolder(tmp_path)) is folder
    with pytest.raises(ValueError, match=r"cannot open this file system: .*file nothing://x.*; fix: "):
        open_folder("nothing://x")


def test_files_and_their_folders_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that has been written outlives a loss of power: it, its folder, and the folder's own place."""
    synced: list[str] = []
    monkeypatch.setattr(
        "os.fsync", lambda descriptor: synced.append(Path(f"/proc/self/fd/{descriptor}").resolve().name)
    )
    folder = LocalFolder(tmp_path / "run" / "step")
    with folder.create("data") as file:
        file.write(b"x")
    assert synced == ["data", "step", "run"]
    synced.clear()
    folder.write("index", b"y")
    assert synced[0].startswith(".index.") and synced[-2:] == ["step", "run"]


def test_a_large_files_pages_are_given_back_as_they_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of 6 bytes in groups of 4: each is told when it is written, and again when 10 bytes lie behind it."""
    told: list[tuple[int, int]] = []
    monkeypatch.setattr("os.posix_fadvise", lambda _, offset, nbytes, how: told.append((offset, offset + nbytes)))
    monkeypatch.setattr("rayrec.storage.folder._FOLIO", 4)
    monkeypatch.setattr("rayrec.storage.folder._BEHIND", 10)
    folder = LocalFolder(tmp_path)
    with folder.create("data") as file:
        for _ in range(4):
            file.write(b"abcdef")
    assert told == [(0, 6), (2, 12), (8, 18), (0, 8), (14, 24), (4, 14)]
    told.clear()
    with folder.open("data") as source:
        source.forget(9, 6)
        source.forget(0, 3)
    assert told == [(5, 15), (0, 3)]


def test_what_a_place_means(tmp_path: Path) -> None:
    root = LocalFolder(tmp_path / "run")
    root.sub("checkpoints").sub(folder_name(1, 1)).write(MANIFEST, manifest().to_json())
    for place in (f"{root.path}/", root.path, f"{root.path}/checkpoints"):
        store, name = store_of(place)
        assert (store.root.path, name) == (f"{root.path}/checkpoints", None)
    store, name = store_of(f"{root.path}/checkpoints/{folder_name(1, 1)}")
    assert (store.root.path, name) == (f"{root.path}/checkpoints", folder_name(1, 1))
    with pytest.raises(CheckpointError, match="is neither a checkpoint"):
        store_of(str(tmp_path))


@pytest.mark.parametrize(
    "told, fits",
    [
        ([("a", 80, 100)], True),
        ([("a", 81, 100)], False),
        ([("a", 40, 100), ("a", 41, 200)], False),
        ([("a", 40, 200), ("a", 40, 100)], True),
        ([("a", 80, 100), ("b", 81, 100)], False),
        ([("a", 80, 100), ("b", 80, 100)], True),
    ],
)
def test_ranks_of_a_host_share_its_memory(told: list[tuple[str, int, int]], fits: bool) -> None:
    assert _fit(told) == fits


def test_pinned_memory_of_earlier_copies_is_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it can be seen without a GPU: torch never gives it back to the system."""
    monkeypatch.setattr(saving, "available_bytes", lambda: 100)
    assert fits_in_memory(80, None) and not fits_in_memory(81, None)
    kept = {"allocated_bytes.current": 64, "active_bytes.current": 16}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: kept)
    assert fits_in_memory(128, None) and not fits_in_memory(129, None)
    on_gpu = [SimpleNamespace(is_cuda=True, nbytes=nbytes) for nbytes in (0, 1, 4, 5)]
    assert copy_bytes(on_gpu) == 1 + 4 + 8 and copy_bytes([torch.ones(5)]) == 20  # type: ignore[arg-type]


def test_memory_is_the_hosts_or_the_containers(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) == 1 << 62  # nothing is told
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000 kB\nMemAvailable:    3000 kB\nMemFree: 10 kB\n")
    assert available_bytes(tmp_path) == 3000 * 1024
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.current").write_text("500\n")
    for limit, room in [("max\n", 3000 * 1024), ("2000\n", 1500), (f"{1 << 40}\n", 3000 * 1024)]:
        (group / "memory.max").write_text(limit)
        assert available_bytes(tmp_path) == room


def test_looks_are_close_together_at_first() -> None:
    milliseconds = [round(1000 * pause) for pause in islice(waits_s(FIRST_POLL_S, LONGEST_POLL_S), 10)]
    assert milliseconds == [2, 4, 8, 16, 32, 64, 128, 256, 500, 500]
    assert deadline(0)() and not deadline(1000)()


def test_what_failed_is_told_before_what_is_damaged() -> None:
    def fail(*failures: Exception) -> Any:
        from rayrec.checkpoint.polling import _worst

        return _worst(list(failures))

    rotten, gone = Damage("f", "rotten"), Damage("g", "gone")
    one, two = DamagedCheckpointError("p", [rotten]), DamagedCheckpointError("q", [rotten, gone])
    full, shut = OSError("full"), ValueError("shut")
    assert fail(one, full, shut) is full
    assert fail(one, two).damages == (rotten, gone) and fail(two, one).path == "q"
    with pytest.raises(OSError, match="full") as raised:
        on_every_rank(lambda: (_ for _ in ()).throw(full), None)
    assert raised.value is full
    assert on_every_rank(lambda: 5, None) == 5


def save_of(root: Folder, step: int, called: list[str], may: Any = lambda: None, world_size: int = 1) -> Save:
    return Save(
        folder=root.sub(folder_name(step, 1)),
        rank=0,
        work=Work([Item("dense/a", (3,), (0,), torch.ones(3))], frozenset({"dense/a"})),
        manifest=manifest(step, world_size=world_size),
        may_commit=may,
        committed=lambda: called.append("committed"),
    )


class Together(ArrowFolder):
    """A folder far away, in which reading goes on only once `barrier.parties` files are read at the same time."""

    barrier = Barrier(4, timeout=60)

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
    assert names == [*(f"data-{rank:05d}.safetensors" for rank in range(world_size)), "index.json", MANIFEST]
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
    assert sorted(root.sub(folder_name(5, 1)).names()) == ["data-00000.safetensors", "index.json", MANIFEST]
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


def test_nobody_waits_for_a_removal_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, under = Event(), BackgroundSave()
    monkeypatch.setattr("rayrec.checkpoint.saving.REMOVAL_S", 0.05)
    monkeypatch.setattr(LocalFolder, "remove_all", lambda folder: folder.name == "parts" or gate.wait(60))
    under.start(save_of(LocalFolder(tmp_path), 5, [], may=lambda: 1 // 0))
    began = time.monotonic()
    assert under.wait(None) and time.monotonic() - began < 40
    gate.set()
    assert [type(outcome.error) for outcome in under.ended()] == [ZeroDivisionError]


def test_a_save_that_waits_for_others_in_vain_can_be_given_up(tmp_path: Path) -> None:
    under = BackgroundSave()
    under.start(save_of(LocalFolder(tmp_path), 5, [], world_size=2), during_training=True)
    under.close(0.05)
    assert under.wait(None)
    (outcome,) = under.ended()
    assert type(outcome.error).__name__ == "StoppedError"
    under.close(0.0)


def test_a_commit_without_all_planned_tensors_is_none(tmp_path: Path) -> None:
    save = save_of(LocalFolder(tmp_path), 5, [])
    short = Save(
        **{name: getattr(save, name) for name in save.__dataclass_fields__}
        | {"work": Work(save.work.items, frozenset({"x"}))}
    )  # type: ignore[arg-type]
    assert save.copy_bytes == 12 and save.copied().work.keys == save.work.keys
    with pytest.raises(ValueError, match="wrote other tensors than planned"):
        short.run(Throttle())
    assert MANIFEST not in save.folder.names()
