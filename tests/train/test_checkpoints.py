"""Checkpoints of whole runs: resumed to the last bit, damaged, unreadable, failing, of other mappings; warm starts."""

from __future__ import annotations

import errno
import json
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.checkpoint import CheckpointStore
from rayrec.models import DLRM, Batch
from rayrec.storage import LocalFolder
from rayrec.train import StorageError, TrainError
from tests.ranks import RankError, on_ranks
from tests.train.small import Silent, fit_job, make_job, raw_config
from tests.train.test_fit import records, shown, trainer, write_all


class WithDropout(nn.Module):
    """A DLRM with dropout before it, which may break at a step."""

    def __init__(self, fails_at: int, **args: Any) -> None:
        super().__init__()
        self.inner = DLRM(**args)
        self.dropout = nn.Dropout(0.5)
        self.steps_left = fails_at

    def forward(self, batch: Batch) -> Any:
        if torch.is_grad_enabled():
            self.steps_left -= 1
            if self.steps_left == 0:
                raise KeyError("broken on purpose")
        return self.inner(Batch(self.dropout(batch.dense), batch.sparse, batch.label, batch.weight))


def with_dropout(**args: Any) -> nn.Module:
    return WithDropout(**args)


def fit_with_dropout(group: dist.ProcessGroup, raw: dict[str, Any]) -> list[dict[str, Any]]:
    """Records of training lines."""
    told = Silent()
    fit_job(make_job(raw), group, told)
    return [record for record in told.records if record["kind"] == "train"]


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    store = CheckpointStore(run / "checkpoints")
    checkpoint = store.latest()
    assert checkpoint is not None
    with store.reader(checkpoint) as reader:
        return {key: reader.tensor(key) for key in reader.index.tensors}


def test_a_resumed_run_with_dropout_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    """Broken in step 21, resumed from step 18, in the middle of a logging window, on two ranks as before."""
    write_all(tmp_path)
    told = {}
    for name, fails_at in (("straight", 0), ("broken", 21)):
        args = {"dense_arch": [16, 8], "over_arch": [16, 1], "fails_at": fails_at}
        model = {"factory": "tests.train.test_checkpoints:with_dropout", "args": args}
        raw = raw_config(tmp_path, name=name, model=model, trainer__log_every=4)
        if fails_at:
            with pytest.raises(RankError, match="broken on purpose"):
                on_ranks(2, fit_with_dropout, raw)
            assert CheckpointStore(tmp_path / "runs" / name / "checkpoints").latest().step == 18  # type: ignore[union-attr]
            args["fails_at"] = 0
        told[name] = on_ranks(2, fit_with_dropout, raw)[0]
    straight, resumed = (tensors_of(tmp_path / "runs" / name) for name in ("straight", "broken"))
    assert straight.keys() == resumed.keys()
    for key, tensor in straight.items():
        if key != "tensor/window/sums":  # seconds
            assert torch.equal(resumed[key], tensor), key
    same = ("step", "loss", "ne", "auc", "samples")
    lines = [[{name: line[name] for name in same} for line in told[run]] for run in ("straight", "broken")]
    assert lines[1][0]["step"] == 20 and lines[1] == lines[0][-len(lines[1]) :]


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def cut_short(tmp_path: Path) -> Path:
    """A run of one epoch with checkpoints of steps 6, 12 and 16 and no result; returns its folder."""
    write_all(tmp_path)
    trainer(tmp_path, trainer__epochs=1).fit()
    run = tmp_path / "runs" / "small"
    (run / "result.json").unlink()
    return run


def newest_files(run: Path) -> list[Path]:
    """The folders of checkpoints, the newest first."""
    return sorted((run / "checkpoints").glob("step_*"), reverse=True)


def test_a_run_goes_on_from_the_newest_whole_checkpoint_and_says_so(tmp_path: Path) -> None:
    run = cut_short(tmp_path)
    newest, before, _ = newest_files(run)
    flip(newest / "data-00000.safetensors", -100)
    (before / "manifest.json").write_bytes(b"\xff\xfe")
    result = trainer(tmp_path, trainer__epochs=2).fit()
    straight = trainer(tmp_path, trainer__epochs=2, name="straight").fit()
    assert (result.steps, result.train["samples"], result.eval) == (32, 2000, straight.eval)
    damaged = [record for record in records(run, "event") if record["event"] == "damaged"]
    assert [record["step"] for record in damaged] == [6, 6]
    assert "manifest.json: it cannot be read as JSON" in damaged[0]["message"]
    assert "data-00000.safetensors (" in damaged[1]["message"]
    assert all(record["message"].endswith("; resuming from step 6") for record in damaged)
    assert "is damaged" in shown(tmp_path)


def test_a_run_goes_on_from_the_newest_increment_that_needs_no_damaged_one(tmp_path: Path) -> None:
    """Of a chain of a full checkpoint of step 2 and increments of steps 4, 6 and 8, whose manifests are damaged."""
    changes = {"trainer__checkpoint_every": 100, "storage__increments": {"every": 2}, "storage__background": False}
    raw = raw_config(write_all(tmp_path, rows=800), trainer__max_steps=9, **changes)
    raw["tables"][1]["rows"] = 20_000  # the few rows that change make small increments
    fit_job(make_job(raw))
    last, _, at_6, at_4, base = newest_files(tmp_path / "runs" / "small")
    assert [".increment-" in folder.name for folder in (last, at_6, at_4, base)] == [False, True, True, False]
    shutil.rmtree(last)
    flip(base / "manifest.json", 50)
    with pytest.raises(ValueError, match=f"all checkpoints in .* are damaged: .*{base.name} is damaged"):
        fit_job(make_job(raw))
    flip(base / "manifest.json", 50)
    flip(at_6 / "manifest.json", 50)
    told = Silent()
    fit_job(make_job(raw), sink=told)
    events = [record["message"] for record in told.records if record.get("event") == "damaged"]
    assert len(events) == 1 and at_6.name in events[0] and events[0].endswith("resuming from step 4")


def test_a_run_without_a_whole_checkpoint_does_not_begin_again(tmp_path: Path) -> None:
    run = cut_short(tmp_path)
    for folder in newest_files(run):
        flip(folder / "index.json", 50)
    with pytest.raises(
        TrainError, match=r"all checkpoints in .* are damaged: .*index\.json: the bytes.*start over with --fresh"
    ):
        trainer(tmp_path, trainer__epochs=2).fit()
    assert len(newest_files(run)) == 3


def test_a_checkpoint_that_cannot_be_read_stops_the_run(tmp_path: Path) -> None:
    run = cut_short(tmp_path)
    manifest = newest_files(run)[0] / "manifest.json"
    kept = manifest.read_bytes()
    manifest.unlink()
    manifest.mkdir()  # reading it is an error, also for root
    with pytest.raises(StorageError, match=r"manifest\.json cannot be read \(Is a directory\); nothing was started"):
        trainer(tmp_path, trainer__epochs=2).fit()
    manifest.rmdir()
    manifest.write_bytes(kept)
    assert trainer(tmp_path, trainer__epochs=2).fit().steps == 32


def test_saves_that_fail_are_told_and_the_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path)
    create, made = LocalFolder.create, []

    @contextmanager
    def full(folder: LocalFolder, name: str) -> Any:
        if name.startswith("data-"):
            made.append(folder.name)
            if len(made) in (2, 3):
                raise OSError(errno.ENOSPC, "No space left on device")
        with create(folder, name) as file:
            yield file

    monkeypatch.setattr(LocalFolder, "create", full)
    result = trainer(tmp_path, trainer__epochs=1, trainer__checkpoint_every=4).fit()
    assert result.steps == 16
    events = [(record["event"], record["step"]) for record in records(result.folder, "event")]
    assert [event for event in events if event[0] in ("checkpoint", "save_failed")] == [
        ("checkpoint", 4),
        ("save_failed", 8),
        ("save_failed", 12),
        ("checkpoint", 16),
    ]
    assert [checkpoint.step for checkpoint in CheckpointStore(result.folder / "checkpoints").all()] == [4, 16]
    told = next(record["message"] for record in records(result.folder, "event") if record["event"] == "save_failed")
    assert told.startswith("The checkpoint at step 8 failed (") and "No space left" in told and "are intact" in told


def test_training_may_wait_for_its_checkpoints(tmp_path: Path) -> None:
    write_all(tmp_path)
    waiting = trainer(tmp_path, name="waiting", storage__background=False, trainer__epochs=1).fit()
    beside = trainer(tmp_path, name="beside", trainer__epochs=1).fit()
    assert waiting.eval == beside.eval
    for run in (waiting, beside):
        assert [c.step for c in CheckpointStore(run.folder / "checkpoints").all()] == [6, 12, 16]


def test_checkpoints_by_the_clock(tmp_path: Path) -> None:
    write_all(tmp_path)
    often = {"storage__keep": 100, "trainer__checkpoint_every": "0.000001s"}
    result = trainer(tmp_path, trainer__epochs=1, **often).fit()
    steps = [checkpoint.step for checkpoint in CheckpointStore(result.folder / "checkpoints").all()]
    assert steps == list(range(2, 17))  # the clock starts with the first step
    never = trainer(tmp_path, name="never", trainer__epochs=1, trainer__checkpoint_every=None).fit()
    assert [checkpoint.step for checkpoint in CheckpointStore(never.folder / "checkpoints").all()] == [16]


def test_the_best_checkpoint_stays(tmp_path: Path) -> None:
    write_all(tmp_path)
    result = trainer(tmp_path, storage__keep_best="auc", storage__keep=1, trainer__eval_every=5).fit()
    scores = {record["step"]: record["auc"] for record in records(result.folder, "eval")}
    best = max(scores, key=lambda step: (scores[step], -step))
    kept = [checkpoint.step for checkpoint in CheckpointStore(result.folder / "checkpoints").all()]
    assert kept == sorted({best, 32})
    assert set(scores) == {5, 10, 15, 16, 20, 25, 30, 32}


def test_an_epoch_whose_full_evaluation_was_cut_short_is_evaluated_after_a_relaunch(tmp_path: Path) -> None:
    """The evaluation of some rows that came before it does not count, and the checkpoint may become the best."""
    write_all(tmp_path)
    evaluated: list[torch.Tensor] = []

    class Breaks(DLRM):
        def forward(self, batch: Batch) -> Any:
            if not self.training:
                evaluated.append(batch.label)
                if len(evaluated) == 3:  # after the check of the set and the evaluation of some rows
                    raise KeyError("broken on purpose")
            return super().forward(batch)

    changes = {"trainer__eval_every": 16, "trainer__eval_rows": 64, "storage__keep_best": "auc", "storage__keep": 9}
    with pytest.raises(TrainError, match="broken on purpose"):
        trainer(tmp_path, factory=Breaks, **changes).fit()
    run = tmp_path / "runs" / "small"
    assert [(line["step"], line.get("partial")) for line in records(run, "eval")] == [(16, True)]
    trainer(tmp_path, **changes).fit()
    whole = [(line["step"], line["auc"]) for line in records(run, "eval") if not line.get("partial")]
    assert [step for step, _ in whole] == [16, 32]
    scores = json.loads((run / "checkpoints" / "scores.json").read_text())
    assert [(int(name[5:13]), metrics["auc"]) for name, metrics in scores.items()] == whole


def with_vocabulary(tmp_path: Path, ids: list[int], rows: int = 45, **changes: Any) -> dict[str, Any]:
    """The small config with users by a vocabulary."""
    path = tmp_path / "users.txt"
    path.write_text("\n".join(map(str, ids)) + "\n")
    raw = raw_config(tmp_path, trainer__epochs=1, **changes)
    raw["schema"]["sparse"][0]["mapping"] = {"kind": "vocabulary", "path": str(path), "oov_rows": 2}
    raw["tables"][0]["rows"] = rows
    changed: dict[str, Any] = {name: raw[name] for name in ("schema", "tables")}
    return changed


def fresh_vocabularies() -> None:
    from rayrec.data.mapping.vocabulary import close_vocabularies

    close_vocabularies()


def test_a_vocabulary_that_changed_under_a_run_is_refused_by_name(tmp_path: Path) -> None:
    write_all(tmp_path)
    trainer(tmp_path, trainer__epochs=1, **with_vocabulary(tmp_path, list(range(40)))).fit()
    fresh_vocabularies()
    again = with_vocabulary(tmp_path, [1, 0, *range(2, 40)])
    with pytest.raises(TrainError, match="feature 'user': its ids would mean other rows: vocabulary checksum is"):
        trainer(tmp_path, trainer__epochs=2, **again).fit()


def test_a_new_run_begins_with_the_weights_of_another(tmp_path: Path) -> None:
    """Users were added at the end of the vocabulary, and their table grew."""
    write_all(tmp_path)
    base = trainer(tmp_path, name="base", trainer__epochs=1, **with_vocabulary(tmp_path, list(range(30)), 32)).fit()
    fresh_vocabularies()
    grown = with_vocabulary(tmp_path, list(range(40)), 50)
    how: dict[str, Any] = {"trainer__epochs": 1, "optimizers__sparse": {"kind": "sgd", "lr": 1e-12}, **grown}
    how["optimizers__dense"] = {"kind": "sgd", "lr": 1e-12}
    new = trainer(tmp_path, name="new", init_from=str(base.folder), **how).fit()
    before, after = tensors_of(base.folder), tensors_of(new.folder)
    user = next(key for key in before if key.startswith("table/") and key.endswith("user"))
    assert after[user].shape == (50, 8)
    torch.testing.assert_close(after[user][:32], before[user])
    assert not torch.equal(after[user][32:], torch.zeros(18, 8))
    for key in before:
        if key.startswith(("table/", "dense/")) and key != user:
            torch.testing.assert_close(after[key], before[key])
    events = [record for record in records(new.folder, "event") if record["event"] == "warm_start"]
    assert len(events) == 1 and "3 tables" in events[0]["message"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [1, 0, *range(2, 40)]}, "feature 'user': the first 30 ids of .* differ from the ids"),
        ({"rows_of_item": 90}, "table 'item': feature 'item': .*rows was 80 and is 90"),
        ({"path": "nowhere"}, "init_from: .*nowhere is neither a checkpoint"),
    ],
)
def test_weights_whose_ids_mean_other_rows_are_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    write_all(tmp_path)
    trainer(tmp_path, name="base", trainer__epochs=1, **with_vocabulary(tmp_path, list(range(30)), 32)).fit()
    fresh_vocabularies()
    how = with_vocabulary(tmp_path, change.get("ids", list(range(40))), 50)
    how["tables"][1]["rows"] = change.get("rows_of_item", 80)
    source = str(tmp_path / change.get("path", "runs/base"))
    with pytest.raises(TrainError, match=message):
        trainer(tmp_path, name="new", trainer__epochs=1, init_from=source, **how).fit()
