"""Which checkpoint commands read: the newest, the best, that of a step; what they say where a newer one is damaged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from rayrec.checkpoint import CheckpointStore
from rayrec.cli import run
from rayrec.train.errors import TrainError
from rayrec.train.run.choice import choose
from rayrec.train.run.folder import RunFolder
from tests.train.small import raw_config, write_all

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


def test_evaluate_names_what_it_read_and_damage_of_a_newer_one(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, older, old, new = checkpoints(copy)
    assert run(["evaluate", str(copy)]) == 0
    told = capsys.readouterr()
    assert f"read the checkpoint of step 20: {new}" in told.out and told.err == ""

    flip_a_bit(new)
    cut(old)
    assert run(["evaluate", str(copy)]) == 0
    told = capsys.readouterr()
    assert f"read the checkpoint of step 12: {older}" in told.out
    for damaged in (old, new):
        assert f"the checkpoint {damaged} is damaged: " in told.err
    assert told.err.count("; read instead: step 12\n") == 2
    assert json.loads((copy / "evaluation.json").read_text())["step"] == 12

    for number, damaged in (("20", new), ("16", old)):  # no other is read where one is named
        assert run(["evaluate", str(copy), "--checkpoint", number]) == 1
        told = capsys.readouterr()
        assert f"the checkpoint {damaged} is damaged: " in told.err and "fresh" not in told.err
    assert run(["evaluate", str(copy), "--checkpoint", "8"]) == 0
    assert "read the checkpoint of step 8: " in capsys.readouterr().out


@pytest.mark.parametrize("harm", [flip_a_bit, cut])
def test_export_and_predict_read_no_damaged_one_in_silence(
    harm: object, copy: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    new = checkpoints(copy)[-1]
    assert callable(harm)
    harm(new)
    status = 0 if harm is cut else 1  # damage of a manifest is seen before anything is exported
    rows = str(trained.parent.parent / "eval")
    for number, words in enumerate((["export", str(copy)], ["predict", str(copy), rows])):
        assert run([*words, str(tmp_path / f"first-{number}")]) == status
        told = capsys.readouterr()
        assert f"the checkpoint {new} is damaged: " in told.err
        if harm is cut:
            assert "read instead: step 16" in told.err and "read the checkpoint of step 16: " in told.out
        else:
            assert "another may be whole: --checkpoint with its step (4, 8, 10, 12, 16)" in told.err
        assert run([*words, str(tmp_path / f"second-{number}"), "--checkpoint", "12"]) == 0
        told = capsys.readouterr()
        assert "read the checkpoint of step 12: " in told.out and told.err == ""


def test_tools_name_damage_of_a_newer_manifest(copy: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *_, old, new = checkpoints(copy)
    cut(new)
    for words in (["inspect", str(copy)], ["convert", str(copy), str(tmp_path / "all.safetensors")]):
        assert run(["checkpoint", *words]) == 0
        told = capsys.readouterr()
        assert str(old) in told.out and "step 16" in told.out
        assert f"the checkpoint {new} is damaged: " in told.err and "read instead: step 16" in told.err


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
    folder, there = RunFolder(copy), r"4, 8, 10, 12, 16, 20"
    for which, text in (
        ("7", rf"^--checkpoint 7: .*small has no checkpoint of that step; it has {there}$"),
        ("last", "^--checkpoint last: give newest, best, or the number of a step$"),
        ("-1", "^--checkpoint -1: give newest, best, or the number of a step$"),
    ):
        with pytest.raises(TrainError, match=text):
            choose(folder, which)
    (copy / "checkpoints" / "scores.json").unlink()
    with pytest.raises(TrainError, match=rf"no checkpoint of .*small has a score of .*=auc yet; .*\({there}\)$"):
        choose(folder, "best")
    raw = yaml.safe_load(folder.config.read_text())
    raw["storage"]["keep_best"] = None
    folder.config.write_text(yaml.safe_dump(raw))
    with pytest.raises(TrainError, match=r"was trained without storage\.keep_best, so no checkpoint has a score"):
        choose(folder, "best")
    assert run(["export", str(checkpoints(copy)[0]), str(tmp_path / "x"), "--checkpoint", "8"]) == 1
    assert "is a checkpoint already; give the run folder" in capsys.readouterr().err
    shutil.rmtree(copy / "checkpoints")
    for words in (["evaluate", str(copy)], ["export", str(copy), str(tmp_path / "x")]):
        assert run(words) == 1
        assert "has no complete checkpoint yet; train it first" in capsys.readouterr().err
