"""`rayrec checkpoint verify|inspect|convert|copy|prune`, and a new model from another one's weights."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from rayrec.checkpoint import CheckpointError, CheckpointStore, RemovedCheckpointError, Saving
from rayrec.checkpoint.tools import copy, describe, find, verify
from rayrec.checkpoint.warm_start import Names, load_weights
from rayrec.checkpoint.writer import Item, Throttle
from rayrec.cli import run
from rayrec.distributed import DistributedModelParallel, EmbOptimType, ShardingEnv
from rayrec.models import DLRM
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from tests.checkpoint.test_parts import save_of
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


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_a_checkpoint_is_copied_whole(
    saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], scheme: str
) -> None:
    out = f"{scheme}{tmp_path}/backup"
    assert run(["checkpoint", "copy", str(saved[0]), out]) == 0
    assert f"copied the checkpoint of step 2: {tmp_path}/backup/step_00000002-0001" in capsys.readouterr().out
    assert run(["checkpoint", "verify", out]) == 0
    source = find(str(saved[0]))[1]
    files = {path.name: path.read_bytes() for path in Path(source.path).iterdir()}
    copied = tmp_path / "backup" / source.name
    assert {path.name: path.read_bytes() for path in copied.iterdir()} == files
    assert run(["checkpoint", "copy", source.path, out]) == 1
    assert "step_00000002-0001 exists; remove it, or copy into another folder" in capsys.readouterr().err
    (copied / "manifest.json").unlink()  # as an interrupted copy leaves it
    assert run(["checkpoint", "copy", source.path, out]) == 0
    older = str(Path(source.path).parent / "step_00000001-0001")
    assert run(["checkpoint", "copy", older, out]) == 0
    assert [checkpoint.step for checkpoint in CheckpointStore(out).all()] == [1, 2]


def test_a_copy_of_a_checkpoint_that_its_run_removes_leaves_nothing(saved: Any, tmp_path: Path) -> None:
    """Opening a named pipe waits for its writer, so the copy has begun when the run removes what it copies."""
    shutil.copytree(saved[0], tmp_path / "run")
    source = Path(find(str(tmp_path / "run"))[1].path)
    pipe = source / "data-00000.safetensors"
    pipe.unlink()
    os.mkfifo(pipe)

    def remove() -> None:
        with open(pipe, "wb"):
            shutil.rmtree(source)

    run_ends = threading.Thread(target=remove)
    run_ends.start()
    with pytest.raises(RemovedCheckpointError, match="step_00000002-0001 was removed while it was read"):
        copy(str(tmp_path / "run"), str(tmp_path / "out"))
    run_ends.join()
    assert not (tmp_path / "out" / source.name).exists()


def test_old_checkpoints_are_pruned_and_the_best_one_stays(
    saved: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    shutil.copytree(saved[0], root)
    checkpoints, newest = root / "checkpoints", Path(find(str(root))[1].path)
    shutil.copytree(newest, checkpoints / "step_00000003-0001")
    (root / "config.yaml").write_text("name: run\nstorage: {keep_best: auc}\n")
    scores = {"step_00000001-0001": {"auc": 0.9}, "step_00000002-0001": {"auc": 0.8}}
    (checkpoints / "scores.json").write_text(json.dumps(scores))
    assert run(["checkpoint", "prune", str(root), "--keep", "3"]) == 0
    assert "nothing to remove" in capsys.readouterr().out
    assert run(["checkpoint", "prune", str(root), "--keep", "1"]) == 0
    assert capsys.readouterr().out == "removed step_00000002-0001\n"
    assert sorted(path.name for path in checkpoints.glob("step*")) == ["step_00000001-0001", "step_00000003-0001"]
    manifest = checkpoints / "step_00000003-0001" / "manifest.json"
    manifest.write_text("{")
    assert run(["checkpoint", "prune", str(root), "--keep", "1"]) == 1
    assert "nothing was removed" in capsys.readouterr().err and len(list(checkpoints.glob("step*"))) == 2
    assert run(["checkpoint", "prune", str(checkpoints / "step_00000001-0001"), "--keep", "1"]) == 1
    assert "is a single checkpoint; give its run" in capsys.readouterr().err
    assert not (checkpoints / "launch.json").exists()


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
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == weights.keys()
    for name, tensor in weights.items():
        torch.testing.assert_close(found[name], tensor, atol=0, rtol=0)
    unsharded = DLRM(tables(), 2, dense_arch=[16], over_arch=[8, 1])
    unsharded.load_state_dict(found)
    assert run(["checkpoint", "convert", str(root), str(tmp_path / "all.safetensors"), "--optimizer"]) == 0
    kept = load_file(tmp_path / "all.safetensors")
    assert kept[f"optimizer.{PATH}.a.momentum1"].shape == (11, 16)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["all.safetensors", "model.safetensors"]


def test_a_checkpoint_is_described_line_by_line(tmp_path: Path) -> None:
    """And a folder without a checkpoint is none, for whoever asks."""
    root = CheckpointStore(tmp_path / "checkpoints").root
    for place in (tmp_path, root.path):
        root.sub("other").write("file", b"")
        for told in (lambda at: find(str(at)), lambda at: list(verify(str(at)))):
            with pytest.raises(CheckpointError):
                told(place)
    sizes = {"table/a": (1000, 30), "table/b": (2, 3), "dense/bias": (5,), "dense/scale": (), "rng/00000/torch": (4,)}
    items = [Item(key, size, (0,) * len(size), torch.zeros(size)) for key, size in sizes.items()]
    made = save_of(root, 5, [], items=items)
    mapping = {"user": {"kind": "hash", "seed": 3}, "item": {"kind": "identity"}}
    facts = replace(made.manifest, mapping=mapping, world_size=1, time=86_400.0)
    replace(made, manifest=facts).run(Throttle())
    assert describe(str(tmp_path)) == [
        f"{root.path}/step_00000005-0001: step 5, attempt 1, 1970-01-02 00:00:00 UTC",
        "written by 1 ranks; 0.1 MB in 1 data files",
        "2 tables, 30,006 numbers",
        "  a: 1000 x 30 float32",
        "  b: 2 x 3 float32",
        "2 layers, 6 numbers",
        "  bias: 5 float32",
        "  scale: number float32",
        "1 other tensors: optimizer states, random states, metrics",
        "ids of item: kind identity",
        "ids of user: kind hash, seed 3",
    ]


def model_of(rows: int, dim: int, names: str = "t") -> DistributedModelParallel:
    """Tables of one size, each named by one letter."""
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{name}"])
        for name in names
    ]
    return DistributedModelParallel(
        EmbeddingBagCollection(configs), env=ShardingEnv.from_local(1, 0), device=torch.device("cpu")
    )


def weight_of(model: DistributedModelParallel) -> torch.Tensor:
    ((item,),) = (table.local for table in model.tables().values())
    return item.weight


@pytest.mark.parametrize(
    ("here", "same", "taken"),
    [(20, None, 20), (20, 3, 3), (9, 3, 3), (9, 15, 9), (30, 25, 20), (20, 0, 0)],
)
def test_a_warm_start_takes_the_first_rows_that_mean_the_same(
    tmp_path: Path, here: int, same: int | None, taken: int
) -> None:
    """Of 20 rows of 4."""
    store, old, new = CheckpointStore(tmp_path), model_of(20, 4), model_of(here, 4)
    saved = store.save(1, old)
    weight_of(new).fill_(7.0)
    told = load_weights(store, saved, new, Names(renames={}), {} if same is None else {"t": same})
    torch.testing.assert_close(weight_of(new)[:taken], weight_of(old)[:taken], rtol=0, atol=0)
    assert bool((weight_of(new)[taken:] == 7.0).all())
    assert (told.layers, told.fresh) == ((), ()) and told.tables == tuple(new.tables())


def drawn() -> tuple[float, float, float]:
    return torch.rand(()).item(), random.random(), float(np.random.normal())


def test_random_numbers_go_on_in_a_world_as_large_only(tmp_path: Path) -> None:
    store, model = CheckpointStore(tmp_path), model_of(4, 4)
    np.random.normal()  # numpy keeps the second of two
    saved = store.save(1, model)
    expected = drawn()
    assert drawn() != expected
    store.load(saved, model)
    assert drawn() == expected
    other = replace(saved, manifest=replace(saved.manifest, world_size=2))
    before = torch.get_rng_state()
    store.load(other, model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("here", "rows"), [((9, 4), {}), ((20, 8), {}), ((20, 8), {"t": 3})])
def test_a_table_of_another_size_is_not_taken(tmp_path: Path, here: tuple[int, int], rows: dict[str, int]) -> None:
    store = CheckpointStore(tmp_path)
    saved = store.save(1, model_of(20, 4))
    with pytest.raises(CheckpointError, match=rf"is \({here[0]}, {here[1]}\) \(rows, dim\), but \(20, 4\) in"):
        load_weights(store, saved, model_of(*here), Names(renames={}), rows)


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
    with pytest.raises(CheckpointError, match=r"embedding_bags\.a' would be loaded twice"):
        warm(None, root, Names(renames={"a": "b"}), {"a": 1, "b": 1})


@pytest.mark.parametrize(("here", "named"), [("abcde", "c, {0}d, {0}e)"), ("abcdef", "c, {0}d, {0}e and 1 more)")])
def test_the_first_names_are_told(tmp_path: Path, here: str, named: str) -> None:
    store = CheckpointStore(tmp_path)
    saved = store.save(1, model_of(4, 4))
    with pytest.raises(CheckpointError, match=re.escape(named.format("embedding_bags."))):
        load_weights(store, saved, model_of(4, 4, here), Names(renames={}), {})


def test_names_of_a_warm_start_are_whole_parts() -> None:
    names = Names(renames={"old": "new", "b.c": "d", "e.a": "f"}, fresh=("top", "x.y"))
    told = {
        "new": "old",
        "a.new.w": "a.old.w",
        "newer.new": "newer.old",
        "d.new": "d.old",
        "z.d": "z.b.c",
        "a": "a",
        "atop.w": "atop.w",
        "x.yy": "x.yy",
        "x.newer.weight": "x.newer.weight",
        "x.f": "x.e.a",
    }
    assert {name: names.source(name) for name in told} == told
    assert [names.source(name) for name in ("top", "a.top.w", "x.y.z")] == [None] * 3
