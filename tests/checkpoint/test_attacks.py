"""Checkpoints that someone has made up or that have rotted: nothing in them is run, no path leaves the folder, no wrong
number is loaded."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from rayrec.checkpoint import CheckpointError, CheckpointStore, DamagedCheckpointError, Saving
from rayrec.checkpoint.manifest import Manifest, sha256
from rayrec.distributed import EmbOptimType
from tests.checkpoint.test_store import build, train

ADAGRAD = EmbOptimType.EXACT_ADAGRAD
IdMapping = {"f1": {"mapping": "hash", "seed": 3}, "f2": {"mapping": "identity"}}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one committed checkpoint of a trained model."""
    root = tmp_path_factory.mktemp("saved")
    model, dense = build(None, "tw", ADAGRAD, 1)
    train(model, dense, None, range(2))
    CheckpointStore(root).save(2, model, dense, saving=Saving(mapping=IdMapping))
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy of it to be damaged."""
    return shutil.copytree(saved, tmp_path / "checkpoints")


@pytest.fixture(scope="module")
def fresh() -> Any:
    return build(None, "tw", ADAGRAD, 2)


def folder_of(root: Path) -> Path:
    (folder,) = (entry for entry in root.iterdir() if entry.is_dir())
    return folder


def load(root: Path, fresh: Any) -> None:
    store = CheckpointStore(root)
    checkpoint = store.latest()
    assert checkpoint is not None
    store.load(checkpoint, *fresh)


class Attack:
    """Makes a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.proof),)


FILES = ("data-00000.safetensors", "index.json", "manifest.json")


def test_these_are_all_files_of_a_checkpoint(root: Path) -> None:
    assert sorted(entry.name for entry in folder_of(root).iterdir()) == sorted(FILES)


@pytest.mark.parametrize("name", [*FILES, ".metadata", "part-00000.json", "__0_0.distcp", "../attempt.json"])
def test_a_pickle_under_any_name_is_never_run(root: Path, fresh: Any, tmp_path: Path, name: str) -> None:
    proof = tmp_path / "proof"
    data = pickle.dumps(Attack(proof))
    pickle.loads(data)
    assert proof.is_dir(), "the attack would work"
    proof.rmdir()
    (folder_of(root) / name).write_bytes(data)
    if name in FILES:
        with pytest.raises(CheckpointError):
            load(root, fresh)
    else:
        load(root, fresh)
        CheckpointStore(root).save(3, *fresh)
    assert not proof.exists()


def rewrite_index(root: Path, change: Any) -> None:
    """Change the index, and make all checksums right again."""
    folder = folder_of(root)
    raw = json.loads((folder / "index.json").read_text())
    change(raw)
    data = json.dumps(raw).encode()
    (folder / "index.json").write_bytes(data)
    manifest = Manifest.from_json((folder / "manifest.json").read_bytes())
    changed = {name: getattr(manifest, name) for name in Manifest.__dataclass_fields__}
    changed |= {"index_size": len(data), "index_sha256": sha256(data)}
    (folder / "manifest.json").write_bytes(Manifest(**changed).to_json())


TABLE = "table/embedding_bags.embedding_bags.a"


def to_other_file(name: str) -> Any:
    def change(raw: Any) -> None:
        raw["files"][name] = raw["files"].pop("data-00000.safetensors")
        for tensor in raw["tensors"].values():
            for piece in tensor["pieces"]:
                piece[2] = name

    return change


def of_piece(place: int, value: Any) -> Any:
    def change(raw: Any) -> None:
        raw["tensors"][TABLE]["pieces"][0][place] = value

    return change


@pytest.mark.parametrize(
    "change",
    [
        to_other_file("../data-00000.safetensors"),
        to_other_file("/etc/passwd"),
        to_other_file("data-00000.safetensors\n"),
        of_piece(0, [-1, 0]),
        of_piece(0, [1, 0]),
        of_piece(1, [12, 16]),
        of_piece(1, [11]),
        of_piece(2, "data-00001.safetensors"),
        of_piece(3, 1 << 40),
        of_piece(3, 0.5),
        of_piece(4, 0),
        of_piece(5, []),
        lambda raw: raw["tensors"][TABLE].update(dtype="pickle"),
        lambda raw: raw["tensors"][TABLE].update(size=[12, 16]),
        lambda raw: raw["tensors"][TABLE].update(pieces=[]),
        lambda raw: raw.update(version=2),
        lambda raw: raw.update(files=[]),
    ],
)
def test_an_index_that_points_elsewhere_is_refused(root: Path, fresh: Any, change: Any) -> None:
    outside = root / "data-00000.safetensors"
    shutil.copy(folder_of(root) / "data-00000.safetensors", outside)
    rewrite_index(root, lambda raw: None)
    load(root, fresh)
    rewrite_index(root, change)
    with pytest.raises(DamagedCheckpointError, match=r"index\.json: "):
        load(root, fresh)


def test_rot_at_any_place_is_found_and_never_loaded(root: Path, fresh: Any) -> None:
    """Bits flipped and files cut at 200 random places, of every file."""
    draw, folder = random.Random(11), folder_of(root)
    whole = {name: (folder / name).read_bytes() for name in FILES}
    for number in range(200):
        name = FILES[number % 3]
        data = whole[name]
        at, cut = draw.randrange(len(data)), draw.random() < 0.25
        rotten = data[:at] if cut else data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        (folder / name).write_bytes(rotten)
        what = f"{name} {'cut' if cut else 'changed'} at {at} of {len(data)}"
        with pytest.raises(CheckpointError):
            load(root, fresh)
            pytest.fail(f"loaded although {what}")
        store = CheckpointStore(root)
        found = [*store.listing()[1], *(damage for one in store.all() for damage in store.damages(one))]
        assert found, f"not found: {what}"
        (folder / name).write_bytes(data)
    load(root, fresh)


def test_damage_is_named_by_file_table_and_rows(root: Path, fresh: Any) -> None:
    folder = folder_of(root)
    raw = json.loads((folder / "index.json").read_text())
    begin = raw["tensors"][TABLE]["pieces"][0][3]
    data = bytearray((folder / FILES[0]).read_bytes())
    data[begin + 5 * 64] ^= 1
    (folder / FILES[0]).write_bytes(data)
    what = r"data-00000\.safetensors \(table 'embedding_bags\.embedding_bags\.a', rows \[0, 11\)\): the bytes"
    with pytest.raises(DamagedCheckpointError, match=what):
        load(root, fresh)


def test_the_manifest_of_another_model_is_refused(root: Path, fresh: Any, tmp_path: Path) -> None:
    model, dense = build(None, "tw", EmbOptimType.EXACT_SGD, 5)
    other = CheckpointStore(tmp_path / "other").save(2, model, dense)
    shutil.copy(Path(other.path) / "manifest.json", folder_of(root) / "manifest.json")
    with pytest.raises(DamagedCheckpointError, match=r"index\.json: the bytes do not match"):
        load(root, fresh)


@pytest.mark.parametrize(
    ("here", "message"),
    [
        ({**IdMapping, "f1": {"mapping": "hash", "seed": 4}}, "feature 'f1'.*seed is 3 in the checkpoint and 4 here"),
        ({**IdMapping, "f1": {"mapping": "hash", "seed": "y" * 41}}, f"in the checkpoint and {'y' * 37}… here"),
        ({"f1": IdMapping["f1"]}, "the config has no feature 'f2'"),
        ({**IdMapping, "f3": {}}, "the checkpoint has no feature 'f3'"),
    ],
)
def test_another_mapping_of_ids_is_refused_by_name(root: Path, fresh: Any, here: Any, message: str) -> None:
    store = CheckpointStore(root)
    checkpoint = store.latest()
    assert checkpoint is not None
    store.load(checkpoint, *fresh, mapping=IdMapping)
    with pytest.raises(CheckpointError, match=message):
        store.load(checkpoint, *fresh, mapping=here)


def test_a_reader_of_any_language_reads_the_numbers(root: Path, fresh: Any) -> None:
    """The data file is safetensors to its own package."""
    from safetensors.torch import load_file

    tensors = load_file(folder_of(root) / FILES[0])
    load(root, fresh)
    weight = fresh[0].tables()["embedding_bags.embedding_bags.a"].local[0].weight
    torch.testing.assert_close(tensors[f"{TABLE}@0,0"], weight, atol=0, rtol=0)
