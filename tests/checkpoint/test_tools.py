"""`rayrec checkpoint verify|inspect|convert`, and a new model from another one's weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.checkpoint import CheckpointError, CheckpointStore, Saving
from rayrec.checkpoint.warm_start import Names, load_weights
from rayrec.cli.main import run
from rayrec.distributed.kernel import EmbOptimType
from rayrec.models import DLRM
from tests.checkpoint.test_store import build, tables, train
from tests.ranks import on_ranks

ADAGRAD = EmbOptimType.EXACT_ADAGRAD
PATH = "embedding_bags.embedding_bags"


def save_two(group: dist.ProcessGroup, root: str) -> dict[str, torch.Tensor]:
    """A run with two checkpoints; returns the weights of the second, whole, as the sharded model knows them."""
    model, dense = build(group, "cw", ADAGRAD, 1)
    store = CheckpointStore(Path(root, "checkpoints"))
    mapping = {"f1": {"mapping": "hash", "seed": 3}}
    for step in (1, 2):
        train(model, dense, group, range(step))
        store.save(step, model, dense, group=group, saving=Saving(mapping=mapping))
    whole, dense = build(None, "tw", ADAGRAD, 2)
    checkpoint = store.latest()
    assert checkpoint is not None
    store.load(checkpoint, whole, dense)
    return dict(whole.state_dict())


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, torch.Tensor]]:
    root = tmp_path_factory.mktemp("run")
    return root, on_ranks(2, save_two, str(root))[0]


def test_verify_names_what_is_damaged(saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "run"
    for path in saved[0].rglob("*"):
        if path.is_file():
            target = root / path.relative_to(saved[0])
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())
    assert run(["checkpoint", "verify", str(root)]) == 0
    assert capsys.readouterr().out.count(": whole\n") == 2
    newest = CheckpointStore(root / "checkpoints").latest()
    assert newest is not None
    file = Path(newest.path, "data-00001.safetensors")
    file.write_bytes(file.read_bytes()[:-40])
    assert run(["checkpoint", "verify", str(root)]) == 1
    out = capsys.readouterr().out
    assert f"{newest.path}: DAMAGED\n  data-00001.safetensors (" in out and out.count(": whole\n") == 1
    assert run(["checkpoint", "verify", newest.path]) == 1
    assert run(["checkpoint", "verify", str(tmp_path)]) == 1
    assert "is neither a checkpoint" in capsys.readouterr().err


def test_inspect_shows_tables_layers_and_mappings(saved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["checkpoint", "inspect", str(saved[0])]) == 0
    out = capsys.readouterr().out
    for part in ("step 2, attempt 1", "written by 2 ranks", "2 tables, 256 numbers", f"{PATH}.a: 11 x 16 float32"):
        assert part in out
    assert "ids of f1: mapping hash, seed 3" in out


def test_a_checkpoint_becomes_a_file_that_other_programs_read(saved: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    root, weights = saved
    assert run(["checkpoint", "convert", str(root), str(tmp_path / "model.safetensors")]) == 0
    assert run(["checkpoint", "convert", str(root), str(tmp_path / "model.pt"), "--to", "state_dict"]) == 0
    for found in (load_file(tmp_path / "model.safetensors"), torch.load(tmp_path / "model.pt", weights_only=True)):
        assert found.keys() == weights.keys()
        for name, tensor in weights.items():
            torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)
    unsharded = DLRM(tables(), 2, dense_arch=[16], over_arch=[8, 1])
    unsharded.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert run(["checkpoint", "convert", str(root), str(tmp_path / "all.safetensors"), "--optimizer"]) == 0
    kept = load_file(tmp_path / "all.safetensors")
    assert kept[f"optimizer.{PATH}.a.momentum1"].shape == (11, 16)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["all.safetensors", "model.pt", "model.safetensors"]


def warm(group: dist.ProcessGroup | None, root: str, names: Names, rows: dict[str, int]) -> Any:
    """What a fresh model has after a warm start: weights before and after, by name, and what was told."""
    model, _ = build(group, "rw", ADAGRAD, 7)
    before = {name: [item.weight.clone() for item in table.local] for name, table in model.tables().items()}
    store = CheckpointStore(Path(root, "checkpoints"))
    checkpoint = store.latest()
    assert checkpoint is not None
    taken = load_weights(store, checkpoint, model, names, rows, group)
    after = {
        name: [(item.shard.rows.start, item.weight.clone()) for item in table.local]
        for name, table in model.tables().items()
    }
    return taken, before, after


def test_a_warm_start_takes_tables_and_layers_by_name(saved: Any) -> None:
    root, weights = saved
    for taken, before, after in on_ranks(2, warm, str(root), Names(renames={}, fresh=("b", "over_arch")), {"a": 4}):
        assert taken.tables == (f"{PATH}.a",)
        assert f"{PATH}.b" in taken.fresh and all("over_arch" in name for name in taken.fresh if "arch" in name)
        for start, weight in after[f"{PATH}.a"]:
            same = max(0, 4 - start)
            torch.testing.assert_close(weight[:same], weights[f"{PATH}.a.weight"][start : start + len(weight)][:same])
            torch.testing.assert_close(weight[same:], before[f"{PATH}.a"][0][same:])
        for (_, weight), was in zip(after[f"{PATH}.b"], before[f"{PATH}.b"], strict=True):
            torch.testing.assert_close(weight, was)


def test_names_that_do_not_fit_are_told(saved: Any) -> None:
    root = str(saved[0])
    names = Names(renames={"b": "a"}, fresh=("b",))
    with pytest.raises(
        CheckpointError, match=r"table 'embedding_bags\.embedding_bags\.a' is \(11, 16\).*but \(5, 16\)"
    ):
        warm(None, root, names, {})
    with pytest.raises(CheckpointError, match="none of its tables and layers has a name of this model"):
        warm(None, root, Names(renames={}, fresh=("embedding_bags", "dense_arch", "over_arch")), {})
    with pytest.raises(CheckpointError, match=r"embedding_bags\.a' is to be taken twice"):
        warm(None, root, Names(renames={"a": "b"}), {"a": 1, "b": 1})
    assert Names(renames={"old": "new"}).source("x.new.weight") == "x.old.weight"
    assert Names(renames={"old.a": "new"}).source("x.new") == "x.old.a"
    assert Names(renames={"old": "new"}).source("x.newer.weight") == "x.newer.weight"
