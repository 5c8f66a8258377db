"""Saving beside training: what is saved, slow and full disks, other owners of the folder, what is read and kept."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
import time
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.checkpoint import (
    Best,
    CheckpointStore,
    FencedError,
    NoWholeCheckpointError,
    RemovedCheckpointError,
    Saving,
)
from rayrec.checkpoint import writer as writer_module
from rayrec.distributed import (
    DistributedModelParallel,
    EmbeddingBagCollectionSharder,
    EmbOptimType,
    ShardingEnv,
    ShardingPlan,
    ShardingType,
)
from rayrec.distributed.kernel import updating
from rayrec.modules import EmbeddingBagCollection
from rayrec.sparse import KeyedJaggedTensor
from rayrec.storage import LocalFolder
from tests.checkpoint.test_store import build, tables, train
from tests.device import DEVICE
from tests.distributed.oracle import cut, draw_kjt
from tests.ranks import on_ranks

ADAGRAD = EmbOptimType.EXACT_ADAGRAD


class Disk(LocalFolder):
    """A folder on a disk that is slow, full, or cannot be read; `faults` is shared by all folders of the disk."""

    def __init__(self, path: Path, faults: dict[str, Any]) -> None:
        super().__init__(path)
        self.faults = faults

    def sub(self, name: str) -> Disk:
        return Disk(self._path / name, self.faults)

    @contextmanager
    def create(self, name: str) -> Any:
        with super().create(name) as file:
            time.sleep(self.faults.get("delay_s", 0.0))
            if "gate" in self.faults and name.startswith("data-"):
                self.faults["gate"].wait(120)
            if self.faults.get("full") and name.startswith("data-"):
                file.write(b"some of it")
                raise OSError(errno.ENOSPC, "No space left on device", name)
            yield file

    def read(self, name: str) -> bytes:
        if name == self.faults.get("unreadable"):
            raise OSError(errno.ESTALE, "Stale file handle", name)
        return super().read(name)

    @contextmanager
    def open(self, name: str) -> Any:
        with super().open(name) as source:
            faults = self.faults

            class Counting:
                def read_into(self, offset: int, view: memoryview) -> int:
                    faults.setdefault("reads", []).append((offset, len(view)))
                    return source.read_into(offset, view)

                def forget(self, offset: int, nbytes: int) -> None:
                    source.forget(offset, nbytes)

            yield Counting()


def everything(root: Path) -> dict[str, torch.Tensor]:
    """All tensors of the newest checkpoint but random states."""
    store = CheckpointStore(root)
    checkpoint = store.latest()
    assert checkpoint is not None
    with store.reader(checkpoint) as reader:
        return {key: reader.tensor(key) for key in reader.index.tensors if not key.startswith("rng/")}


def save_while_training_goes_on(group: dist.ProcessGroup, root: str) -> None:
    """The same step saved at once, and beside training on a disk that waits until ten steps later."""
    gate = threading.Event()
    model, dense = build(group, "rw", ADAGRAD, 1)
    train(model, dense, group, range(3))
    CheckpointStore(f"{root}/waiting").save(3, model, dense, group=group)
    store = CheckpointStore(Disk(Path(root, "beside"), {"gate": gate}))
    assert store.save_in_background(3, model, dense, Saving(), group)
    train(model, dense, group, range(3, 13))
    assert not store.ended() and not Path(root, "beside", "step_00000003-0001", "manifest.json").exists()
    gate.set()
    store.finish(group)
    assert [(outcome.step, outcome.error) for outcome in store.ended()] == [(3, None)]


def test_a_save_in_background_training_holds_the_numbers_of_its_step(tmp_path: Path) -> None:
    on_ranks(2, save_while_training_goes_on, str(tmp_path))
    waiting, beside = everything(tmp_path / "waiting"), everything(tmp_path / "beside")
    assert waiting.keys() == beside.keys()
    for key, tensor in waiting.items():
        torch.testing.assert_close(beside[key], tensor, atol=0, rtol=0)


def save_on_a_slow_disk(group: dist.ProcessGroup, root: str) -> float:
    """Rank 1's disk takes longer than the group's timeout."""
    impatient = dist.new_group([0, 1], timeout=timedelta(seconds=1), backend="gloo")
    model, dense = build(group, "tw", ADAGRAD, 1)
    disk = Disk(Path(root), {"delay_s": 1.5 if group.rank() == 1 else 0.0})
    began = time.monotonic()
    CheckpointStore(disk).save(1, model, dense, group=impatient)
    return time.monotonic() - began


def test_no_exchange_waits_for_a_slow_disk(tmp_path: Path) -> None:
    seconds = on_ranks(2, save_on_a_slow_disk, str(tmp_path))
    assert min(seconds) > 1.5
    assert CheckpointStore(tmp_path).latest() is not None


def skip_while_one_is_written(group: dist.ProcessGroup, root: str) -> list[bool]:
    gate = threading.Event()
    model, dense = build(group, "tw", ADAGRAD, 1)
    store = CheckpointStore(Disk(Path(root), {"gate": gate}))
    begun = [store.save_in_background(step, model, dense, Saving(), group, patience_s=0.2) for step in (1, 2)]
    gate.set()
    begun.append(store.save_in_background(3, model, dense, Saving(), group))
    store.finish(group)
    return begun


def test_a_save_is_left_out_while_the_one_before_is_written(tmp_path: Path) -> None:
    assert on_ranks(2, skip_while_one_is_written, str(tmp_path)) == [[True, False, True]] * 2
    assert [checkpoint.step for checkpoint in CheckpointStore(tmp_path).all()] == [1, 3]


def fail_on_one_rank(group: dist.ProcessGroup, root: str) -> tuple[list[str], list[str]]:
    """Rank 1's disk is full for the second of three checkpoints."""
    faults: dict[str, Any] = {}
    store = CheckpointStore(Disk(Path(root), faults))
    model, dense = build(group, "rw", ADAGRAD, 1)
    told, left = [], []
    for step in (1, 2, 3):
        faults["full"] = step == 2 and group.rank() == 1
        assert store.save_in_background(step, model, dense, Saving(), group)
        store.finish(group)
        told += [f"{outcome.step}: {outcome.error}" for outcome in store.ended()]
        left = sorted(entry.name for entry in Path(root).iterdir() if entry.is_dir())
    return told, left


def test_a_save_that_fails_on_a_rank_costs_that_save_only(tmp_path: Path) -> None:
    for told, left in on_ranks(2, fail_on_one_rank, str(tmp_path)):
        assert told[0] == "1: None" and told[2] == "3: None"
        assert "No space left on device" in told[1] and "data-00001.safetensors" in told[1]
        assert left == ["step_00000001-0001", "step_00000003-0001"]
    assert [checkpoint.step for checkpoint in CheckpointStore(tmp_path).all()] == [1, 3]


def refuse_together(group: dist.ProcessGroup, root: str) -> str:
    store = CheckpointStore(Disk(Path(root), {"full": group.rank() == 0}))
    model, dense = build(group, "rw", ADAGRAD, 1)
    with pytest.raises(OSError) as raised:
        store.save(1, model, dense, group=group)
    return str(raised.value)


def test_a_save_that_is_waited_for_fails_on_every_rank(tmp_path: Path) -> None:
    for message in on_ranks(2, refuse_together, str(tmp_path)):
        assert "No space left on device" in message
    assert CheckpointStore(tmp_path).latest() is None


def test_an_attempt_that_was_replaced_commits_and_removes_nothing(tmp_path: Path) -> None:
    gate = threading.Event()
    model, dense = build(None, "tw", ADAGRAD, 1)
    zombie = CheckpointStore(Disk(tmp_path, {"gate": gate}), keep=1)
    assert zombie.save_in_background(9, model, dense, Saving(), None)
    later = CheckpointStore(tmp_path)
    mine = later.save(5, model, dense)
    gate.set()
    with pytest.raises(FencedError, match="belongs to attempt 2 of the run; attempt 1 may no longer write"):
        zombie.finish()
    with pytest.raises(FencedError):
        zombie.prune(1)
    assert [checkpoint.name for checkpoint in later.all()] == [mine.name]
    assert CheckpointStore(tmp_path).save(5, model, dense).name == "step_00000005-0003"
    assert CheckpointStore(tmp_path).latest().name == "step_00000005-0003"  # type: ignore[union-attr]


def test_a_later_attempt_removes_what_an_earlier_one_left_unfinished(tmp_path: Path) -> None:
    model, dense = build(None, "tw", ADAGRAD, 1)
    first = CheckpointStore(tmp_path).save(5, model, dense)
    (Path(first.path) / "manifest.json").unlink()
    os.utime(first.path, (0, 0))  # younger ones may only look unfinished
    CheckpointStore(tmp_path).save(2, model, dense)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["attempt.json", "step_00000002-0002"]


def test_the_newest_and_the_best_stay(tmp_path: Path) -> None:
    model, dense = build(None, "tw", ADAGRAD, 1)
    store = CheckpointStore(tmp_path, keep=2, best=Best("logloss", larger=False))
    for step, logloss in enumerate([0.7, 0.5, float("nan"), 0.6, 0.55], 1):
        store.save(step, model, dense)
        store.note_scores(step, {"logloss": logloss, "tasks": {}})
    assert [checkpoint.step for checkpoint in store.all()] == [2, 4, 5]


def test_the_best_stays_where_its_score_comes_after_a_crash(tmp_path: Path) -> None:
    model, dense = build(None, "tw", ADAGRAD, 1)
    best = Best("auc", larger=True)
    first = CheckpointStore(tmp_path, keep=1, best=best).save(1, model, dense)
    store = CheckpointStore(tmp_path, keep=1, best=best)
    store.claim()
    assert not store.note_scores(1, {"auc": 0.9}), "nothing is loaded yet"
    store.load(first, model, dense)
    assert store.note_scores(1, {"auc": 0.9})
    store.save(2, model, dense)
    assert store.note_scores(2, {"auc": 0.5}) and not store.note_scores(3, {"auc": 1.0})
    store.save(4, model, dense)
    assert [checkpoint.step for checkpoint in store.all()] == [1, 4]


def test_what_is_removed_while_it_is_read_is_not_damaged(tmp_path: Path) -> None:
    model, dense = build(None, "tw", ADAGRAD, 1)
    store = CheckpointStore(tmp_path, keep=1)
    old = store.save(1, model, dense)
    reader = store.reader(old)
    key = next(key for key in reader.index.tensors if key.startswith("table/"))
    store.save(2, model, dense)
    gone = rf"{old.path} was removed while it was read, .* run the command again .* or raise storage\.keep"
    with pytest.raises(RemovedCheckpointError, match=gone), reader:
        reader.tensor(key)
    for read in (store.reader, store.damages, lambda old: store.load(old, model, dense)):
        with pytest.raises(RemovedCheckpointError):
            read(old)
    with pytest.raises(RemovedCheckpointError), store.reader(store.all()[0]) as found:
        (Path(found.folder.path) / "manifest.json").unlink()
        raise OSError(errno.EIO, "the object is gone")


def test_a_store_that_takes_nothing_is_given_up_and_one_that_is_slow_is_not(tmp_path: Path) -> None:
    gate = threading.Event()
    model, dense = build(None, "tw", ADAGRAD, 1)
    slow = CheckpointStore(Disk(tmp_path / "slow", {"delay_s": 0.5}), stall_s=2.0)  # five files: 2.5 s together
    slow.save(1, model, dense)
    hung = CheckpointStore(Disk(tmp_path / "hung", {"gate": gate}), stall_s=0.5)
    for _ in range(2):
        with pytest.raises(TimeoutError, match=r"the storage has accepted no data of a checkpoint for 0.5 s"):
            hung.save(1, model, dense)
    gate.set()
    hung.finish()
    assert [(outcome.step, outcome.error) for outcome in hung.ended()] == [(1, None)]


def test_an_old_checkpoint_that_cannot_be_removed_costs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, dense = build(None, "tw", ADAGRAD, 1)
    store = CheckpointStore(tmp_path, keep=1)
    store.save(1, model, dense)
    remove_all = LocalFolder.remove_all

    def fail(folder: LocalFolder) -> None:
        if folder.name.startswith("step_"):
            raise OSError(errno.EIO, "broken disk")
        remove_all(folder)

    with monkeypatch.context() as broken:
        broken.setattr(LocalFolder, "remove_all", fail)
        store.save(2, model, dense)
    assert [checkpoint.step for checkpoint in store.all()] == [2]
    os.utime(tmp_path / "step_00000001-0001", (0, 0))  # what is younger than a minute may be another rank's
    store.save(3, model, dense)
    assert [entry.name for entry in tmp_path.glob("step_*")] == ["step_00000003-0001"]


def test_what_cannot_be_read_is_not_taken_for_missing(tmp_path: Path) -> None:
    model, dense = build(None, "tw", ADAGRAD, 1)
    saved = CheckpointStore(tmp_path).save(1, model, dense)
    with pytest.raises(OSError, match="Stale file handle"):
        CheckpointStore(Disk(tmp_path, {"unreadable": "manifest.json"})).latest()
    with pytest.raises(OSError, match="Stale file handle"):
        CheckpointStore(Disk(tmp_path, {"unreadable": "index.json"})).load(saved, model, dense)
    (Path(saved.path) / "manifest.json").write_bytes(b"\xff\xfe no text")
    with pytest.raises(NoWholeCheckpointError, match=r"manifest\.json: it cannot be read as JSON"):
        CheckpointStore(tmp_path).latest()


def load_a_part(group: dist.ProcessGroup, root: str) -> tuple[int, int]:
    """Bytes that this rank reads of tables, and that it holds of them."""
    faults: dict[str, Any] = {}
    store = CheckpointStore(Disk(Path(root), faults))
    model, dense = build(group, "rw", ADAGRAD, 2)
    checkpoint = store.latest()
    assert checkpoint is not None
    store.load(checkpoint, model, dense, group)
    with store.reader(checkpoint) as reader:
        places = [
            range(piece.begin, piece.begin + piece.rows * piece.row_bytes(4))
            for key, _, piece in reader.index.pieces()
            if key.startswith("table/")
        ]
    read = sum(size for offset, size in faults["reads"] if any(offset in place for place in places))
    held = sum(item.weight.nbytes for table in model.tables().values() for item in table.local)
    return read, held


def test_a_rank_reads_the_rows_that_it_holds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "BLOCK_BYTES", 64)  # a row
    model, dense = build(None, "tw", ADAGRAD, 1)
    CheckpointStore(tmp_path).save(1, model, dense)
    for read, held in on_ranks(2, load_a_part, str(tmp_path)):
        assert read == held > 0


def test_large_tensors_are_saved_in_bounded_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, dense = build(None, "tw", ADAGRAD, 1)
    from rayrec.checkpoint.rectangles import Rectangles

    whole = Rectangles.to_save
    monkeypatch.setattr(Rectangles, "to_save", lambda held: whole(held, 100))
    store = CheckpointStore(tmp_path)
    big = {"big": torch.arange(300, dtype=torch.int64).view(1, 3, 100)}
    checkpoint = store.save(1, model, dense, saving=Saving(tensors=big))
    with store.reader(checkpoint) as reader:
        sizes = [
            (piece.sizes, piece.rows * piece.row_bytes(saved.dtype.itemsize))
            for _, saved, piece in reader.index.pieces()
        ]
    assert max(nbytes for _, nbytes in sizes) <= 100
    torch.testing.assert_close(store.load(checkpoint, model, dense)["big"], big["big"])


def counted_iterations(group: dist.ProcessGroup, root: str) -> tuple[int, list[int]]:
    """Adam counts its updates, and rank 0 has no table that would."""
    model, dense = build(group, "tw", EmbOptimType.ADAM, 1, tw_rank=1)
    train(model, dense, group, range(3))
    own = [kernel.iteration for kernel in model.kernels()]
    return CheckpointStore(root).save(3, model, dense, group=group).manifest.iteration, own


def test_the_iteration_is_that_of_the_ranks_that_have_tables(tmp_path: Path) -> None:
    assert on_ranks(2, counted_iterations, str(tmp_path)) == [(3, []), (3, [3])]


class TwoCollections(nn.Module):
    """One of which is looked up twice a step."""

    def __init__(self) -> None:
        super().__init__()
        self.once, self.twice = (EmbeddingBagCollection([config], seed=n) for n, config in enumerate(tables()))

    def forward(self, kjt: KeyedJaggedTensor) -> torch.Tensor:
        out = [collection(kjt).wait().values() for collection in (self.once, self.twice, self.twice)]
        return sum(bags.square().mean() for bags in out)  # type: ignore[return-value]


def two_collections() -> DistributedModelParallel:
    once, twice = tables()
    return DistributedModelParallel(
        TwoCollections(),
        env=ShardingEnv.from_local(1, 0),
        device=DEVICE,
        plan=ShardingPlan(
            {
                "once": {once.name: cut(once, ShardingType.TABLE_WISE, [0])},
                "twice": {twice.name: cut(twice, ShardingType.TABLE_WISE, [0])},
            }
        ),
        sharders=[EmbeddingBagCollectionSharder({"optimizer": EmbOptimType.ADAM, "learning_rate": 0.1})],
    )


def weights_after(model: DistributedModelParallel, steps: range) -> list[torch.Tensor]:
    for step in steps:
        model(draw_kjt(torch.Generator().manual_seed(step), tables(), 8, 3)).backward()
    return [item.weight.clone() for table in model.tables().values() for item in table.local]


def test_each_table_goes_on_with_its_own_number_of_updates(tmp_path: Path) -> None:
    model = two_collections()
    weights_after(model, range(3))
    store = CheckpointStore(tmp_path)
    checkpoint = store.save(3, model)
    assert checkpoint.manifest.updates == {"once.embedding_bags.a": 3, "twice.embedding_bags.b": 6}
    uninterrupted = weights_after(model, range(3, 6))
    resumed = two_collections()
    store.load(checkpoint, resumed)
    torch.testing.assert_close(weights_after(resumed, range(3, 6)), uninterrupted, atol=0, rtol=0)


def test_a_checkpoint_with_one_number_of_updates_gives_it_to_every_table(tmp_path: Path) -> None:
    """As checkpoints were written until rayrec counted updates for each table."""
    model = two_collections()
    weights_after(model, range(2))
    store = CheckpointStore(tmp_path)
    checkpoint = store.save(2, model)
    path = Path(checkpoint.path) / "manifest.json"
    raw = json.loads(path.read_bytes())
    del raw["updates"], raw["checksum"]
    text = json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()
    path.write_bytes(json.dumps({**raw, "checksum": hashlib.sha256(text).hexdigest()}).encode())
    other = two_collections()
    found = store.latest()
    assert found is not None and found.manifest.iteration == 4
    store.load(found, other)
    assert [kernel.iteration for kernel in updating(other.kernels())] == [4, 4]
