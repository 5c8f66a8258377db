"""Which checkpoint commands read: the newest, the best, that of a step; what they say where a newer one is damaged."""

from __future__ import annotations

import cProfile
import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from rayrec.checkpoint import CheckpointStore
from rayrec.cli import run
from rayrec.train import TrainError, evaluate_run
from rayrec.train.run.choice import choose
from tests.train.small import raw_config, run_folder, write_all

STEPS = [4, 8, 10, 12, 16, 20]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run with several checkpoints, all scored; the data beside it."""
    folder = write_all(tmp_path_factory.mktemp("choice"), rows=600)
    raw = raw_config(folder, trainer__checkpoint_every=4, trainer__eval_every=4)
    raw["storage"] |= {"keep": 20, "keep_best": "auc", "background": False}
    (folder / "c.yaml").write_text(yaml.safe_dump(raw))
    assert run(["train", str(folder / "c.yaml")]) == 0
    assert [step(path) for path in checkpoints(folder / "runs" / "small")] == STEPS
    return folder / "runs" / "small"


@pytest.fixture
def copy(trained: Path, tmp_path: Path) -> Path:
    """A run folder to damage."""
    return Path(shutil.copytree(trained, tmp_path / "small"))


def checkpoints(run_folder: Path) -> list[Path]:
    return sorted((run_folder / "checkpoints").glob("step_*"))


def step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix("step_").partition("-")[0])


def flip_a_bit(checkpoint: Path) -> None:
    """Of the first table's first number."""
    store = CheckpointStore(checkpoint.parent)
    (found,) = [one for one in store.all() if one.name == checkpoint.name]
    with store.reader(found) as reader:
        piece = next(piece for key, _, piece in reader.index.pieces() if key.startswith("table/"))
    raw = bytearray((checkpoint / piece.file).read_bytes())
    raw[piece.begin] ^= 1
    (checkpoint / piece.file).write_bytes(raw)


def cut(checkpoint: Path) -> None:
    manifest = checkpoint / "manifest.json"
    manifest.write_bytes(manifest.read_bytes()[:-20])


READING: dict[str, Callable[[Path, Path], list[str]]] = {  # the command's words for a run folder and a new folder
    "evaluate": lambda copy, out: ["evaluate", str(copy)],
    "export": lambda copy, out: ["export", str(copy), str(out)],
    "predict": lambda copy, out: ["predict", str(copy), str(data_of(copy) / "eval"), str(out)],
    "inspect": lambda copy, out: ["checkpoint", "inspect", str(copy)],
    "convert": lambda copy, out: ["checkpoint", "convert", str(copy), str(out)],
    "init_from": lambda copy, out: [
        *["train", str(data_of(copy) / "c.yaml"), "--name", "warm"],
        *["--set", f"init_from={copy}", "--set", f"storage.path={out}"],
    ],
}


def data_of(folder: Path) -> Path:
    """The folder of a run's data and config."""
    raw = yaml.safe_load((folder / "config.yaml").read_text())
    return Path(raw["data"]["eval"]["path"]).parent


@pytest.mark.parametrize("harm", [flip_a_bit, cut])
@pytest.mark.parametrize("command", READING)
def test_each_command_refuses_damage_unless_an_older_checkpoint_is_asked_for(
    command: str, harm: Callable[[Path], None], copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *_, older, old, new = checkpoints(copy)
    number = itertools.count()

    def outcome(*more: str) -> tuple[int, str, str]:
        """Exit status, what is said on stdout, and on stderr."""
        shutil.rmtree(copy / "exports", ignore_errors=True)  # where predict keeps one
        status = run([*READING[command](copy, tmp_path / f"out-{next(number)}"), *more])
        told = capsys.readouterr()
        return status, told.out, told.err

    exports = command in ("export", "predict")  # several seconds each, so one of the two harms is tried in all ways
    harm(old)
    if not (exports and harm is cut):
        status, out, err = outcome()
        assert status == 0 and new.name in out + err and old.name not in out + err
    harm(new)
    status, out, err = outcome()
    if command == "inspect" and harm is flip_a_bit:  # reads no tensors
        assert status == 0 and new.name in out
        return
    assert status == 1 and f"the checkpoint {new} is damaged: " in err
    if command not in ("evaluate", "export", "predict"):
        return
    assert "to read an older one, use --checkpoint whole (the newest undamaged one) or --checkpoint STEP" in err
    for which in ("whole",) if exports and harm is cut else ("whole", "12"):
        status, out, err = outcome("--checkpoint", which)
        assert status == 0 and "read the checkpoint of step 12: " in out and older.name in out
        named = [f"the checkpoint {damaged} is damaged: " in err for damaged in (old, new)]
        assert named == [which == "whole"] * 2 and err.count("; read instead: step 12\n") == sum(named)
    for which, damaged in (("20", new), ("16", old)):  # no other is read where one is named
        status, out, err = outcome("--checkpoint", which)
        assert status == 1 and f"the checkpoint {damaged} is damaged: " in err


def test_training_alone_goes_on_from_an_older_one_and_says_so(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    new = checkpoints(copy)[-1]
    flip_a_bit(new)
    over = ["--set", f"storage.path={copy.parent}", "--set", "trainer.epochs=3"]
    assert run(["train", str(data_of(copy) / "c.yaml"), *over]) == 0
    told = " ".join("".join(capsys.readouterr()).split())
    assert f"{new.name} is damaged: " in told and "resuming from step 16" in told


def test_the_best_reads_each_manifest_once(trained: Path) -> None:
    profile = cProfile.Profile()
    profile.runcall(choose, run_folder(trained), "best")
    calls = {entry.code.co_name: entry.callcount for entry in profile.getstats() if not isinstance(entry.code, str)}
    assert calls["read_checkpoint"] == len(STEPS)


def test_the_best_is_the_one_with_the_best_score(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scores = copy / "checkpoints" / "scores.json"
    noted = json.loads(scores.read_text())
    assert sorted(step(copy / name) for name in noted) == STEPS
    best = next(path for path in checkpoints(copy) if step(path) == 8)
    noted[best.name]["auc"] = 0.9999
    scores.write_text(json.dumps(noted))
    assert run(["evaluate", str(copy), "--checkpoint", "best"]) == 0
    assert f"read the checkpoint of step 8: {best}" in capsys.readouterr().out
    cut(best)  # the second best is not the best
    assert run(["evaluate", str(copy), "--checkpoint", "best"]) == 1
    assert f"the checkpoint {best} is damaged: " in capsys.readouterr().err


def test_what_cannot_be_chosen_is_refused(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, there = run_folder(copy), r"4, 8, 10, 12, 16, 20"
    for which, text in (
        ("7", rf"^--checkpoint 7: .*small has no checkpoint of that step; it has {there}$"),
        ("last", "^--checkpoint last: give newest, whole, best, or the number of a step$"),
        ("-1", "^--checkpoint -1: give newest, whole, best, or the number of a step$"),
    ):
        with pytest.raises(TrainError, match=text):
            evaluate_run(copy, checkpoint=which)
    (copy / "checkpoints" / "scores.json").unlink()
    with pytest.raises(TrainError, match=rf"no checkpoint of .*small has a score of .*=auc yet; .*\({there}\)$"):
        evaluate_run(copy, checkpoint="best")
    raw = yaml.safe_load(folder.config.read_text())
    raw["storage"]["keep_best"] = None
    folder.config.write_text(yaml.safe_dump(raw))
    with pytest.raises(TrainError, match=r"was trained without storage\.keep_best, so no checkpoint has a score"):
        evaluate_run(copy, checkpoint="best")
    assert run(["export", str(checkpoints(copy)[0]), str(tmp_path / "x"), "--checkpoint", "8"]) == 1
    assert "is a checkpoint; give the run folder" in capsys.readouterr().err
    shutil.rmtree(copy / "checkpoints")
    for words in (["evaluate", str(copy)], ["export", str(copy), str(tmp_path / "x")]):
        assert run(words) == 1
        assert "has no complete checkpoint yet; train it first" in capsys.readouterr().err
