"""Deltas of exports: a full export and its deltas are the newest full export, byte by byte."""

from __future__ import annotations

import fcntl
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
import torch
import yaml

from rayrec.checkpoint import CheckpointStore
from rayrec.cli import run as run_command
from rayrec.inference import ExportError, ExportOptions, ExportStore, Model, apply_deltas, read_delta, write_delta
from rayrec.storage import LocalFolder
from rayrec.train import export_run, parse_config
from tests.dynamic_ids.test_training import raw_of
from tests.train.small import fit_job, make_job, write_all

STEPS = (6, 8, 10)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with dynamic ids and a checkpoint of each of `STEPS`; the last ids are new, and others were evicted."""
    data = write_all(tmp_path_factory.mktemp("deltas"), rows=700)
    raw = raw_of(data, data / "runs", trainer__checkpoint_every=2, trainer__max_steps=10, storage__keep=10)
    raw["storage"]["background"] = False
    raw["tables"][3]["rows"] = 30_000
    fit_job(make_job(raw))
    (data / "runs" / raw["name"] / "config.yaml").write_text(yaml.safe_dump(parse_config(raw).to_dict()))
    (data / "runs" / raw["name"] / "metrics.jsonl").write_text('{"kind": "train", "step": 9, "ne": 0.9}\n')
    return data / "runs" / raw["name"]


def exports_of(run: Path, out: Path, tables: str, steps: tuple[int, ...] = STEPS) -> list[Path]:
    options = ExportOptions(tables=tables, parity=64, force=True)
    return [
        export_run(next((run / "checkpoints").glob(f"step_{step:08d}-*")), out / f"{tables}-{step}", options).folder
        for step in steps
    ]


@pytest.fixture(scope="module")
def chain(run: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], list[Path]]:
    """(int8 exports, the deltas between them)"""
    folder = tmp_path_factory.mktemp("chain")
    exports, deltas = exports_of(run, folder, "int8"), list[Path]()
    for number, (old, new) in enumerate(zip(exports, exports[1:], strict=False), 1):
        after = read_delta(deltas[-1]) if deltas else None
        write_delta(old, new, folder / f"delta-{number}", after, watermark=float(number))
        deltas.append(folder / f"delta-{number}")
    return exports, deltas


def same_files(one: Path, other: Path) -> bool:
    names = [sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()) for root in (one, other)]
    return names[0] == names[1] and all((one / name).read_bytes() == (other / name).read_bytes() for name in names[0])


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_a_full_export_and_its_deltas_are_the_newest_export_byte_by_byte(
    chain: tuple[list[Path], list[Path]], tmp_path: Path
) -> None:
    exports, deltas = chain
    for count in (0, 1, 2):
        (tmp_path / f"{count}").mkdir()
        index = apply_deltas(exports[0], deltas[:count], tmp_path / f"{count}")
        assert same_files(tmp_path / f"{count}", exports[count])
        assert index.version == read_delta(deltas[count - 1]).version if count else True
    delta = read_delta(deltas[1])
    assert (delta.sequence, delta.watermark) == (2, 2.0)
    assert {"tables.bin", "ids/1.bin"} <= set(delta.changed)
    rows = sum(strip.rows for strip in delta.changed["tables.bin"])
    assert 0 < rows < 1000 and (deltas[1] / "rows" / "tables.bin").stat().st_size == rows * (8 + 12)


@pytest.mark.long
@pytest.mark.parametrize("tables", ["fp32", "fp16"])
def test_deltas_have_every_number_format(run: Path, tmp_path: Path, tables: str) -> None:
    old, new = exports_of(run, tmp_path, tables, STEPS[:2])
    write_delta(old, new, tmp_path / "delta")
    (tmp_path / "applied").mkdir()
    apply_deltas(old, [tmp_path / "delta"], tmp_path / "applied")
    assert same_files(tmp_path / "applied", new)


@pytest.mark.parametrize("fault", ["lost", "doubled", "out of order", "damaged", "changed", "other"])
def test_a_delta_that_does_not_fit_is_named_and_makes_no_export(
    chain: tuple[list[Path], list[Path]], tmp_path: Path, fault: str
) -> None:
    exports, (first, second) = chain
    out, base, third = tmp_path / "out", exports[0], tmp_path / "third"
    out.mkdir()
    if fault in ("damaged", "changed"):
        shutil.copytree(second, third)
        path = third / ("rows/tables.bin" if fault == "damaged" else "delta.json")
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    if fault == "other":  # an export of the same version with other files
        base = tmp_path / "base"
        shutil.copytree(exports[0], base)
        (base / "export.json").write_text(
            (base / "export.json").read_text().replace('"parity.html": [\n   ', '"p": [1')
        )
    given = {
        "lost": [second],
        "doubled": [first, first],
        "out of order": [second, first],
        "damaged": [first, third],
        "changed": [first, third],
        "other": [first],
    }[fault]
    words = {
        "lost": f"{read_delta(second).version}, number 2 .* is lost",
        "doubled": f"{read_delta(first).version} comes twice",
        "out of order": f"{read_delta(second).version}, number 2 .* out of order",
        "damaged": r"rows/tables.bin is damaged \(wrong checksum\)",
        "changed": "delta.json is damaged",
        "other": "was made from another export",
    }
    with pytest.raises(ExportError, match=words[fault]):
        apply_deltas(base, given, out)
    assert not (out / "export.json").exists()


def test_a_run_is_published_as_a_full_export_then_as_deltas(
    run: Path, chain: tuple[list[Path], list[Path]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same checkpoint is published once with the same options, an export as it is, and nothing while the entropy is
    above the limit."""
    out = tmp_path / "published"
    assert run_command(["publish", str(chain[0][0]), str(out)]) == 0
    assert "full export, step 6" in capsys.readouterr().out
    told = []
    for step, options in ((8, []), (8, []), (10, ["--max-ne", "0.1"])):
        checkpoint = next((run / "checkpoints").glob(f"step_{step:08d}-*"))
        command = ["publish", str(checkpoint), str(out), "--tables", "int8", "--parity", "64", "--force", *options]
        told.append((run_command(command), capsys.readouterr()))
    assert run_command(["publish", str(chain[0][2]), str(out)]) == 0
    assert "delta 2 of" in capsys.readouterr().out
    codes, outputs = zip(*told, strict=True)
    assert codes[:2] == (0, 0) and codes[2] != 0
    assert "delta 1 of" in outputs[0].out and "step 8" in outputs[0].out
    assert "is of the checkpoint of step 8 already" in outputs[1].out
    assert "normalized entropy" in outputs[2].err and "not published" in outputs[2].err
    full, delta, _ = sorted(out.iterdir())
    assert size_of(delta) < 0.3 * size_of(full)
    store = ExportStore(out)
    made = store.open(store.newest()).folder
    assert Model(made).index.origin["step"] == 10 and same_files(made, chain[0][2])
    other = tmp_path / "other"
    shutil.copytree(run, other)
    config = yaml.safe_load((other / "config.yaml").read_text())
    (other / "config.yaml").write_text(yaml.safe_dump({**config, "name": "other"}))
    for source in (run, other):  # with other options; then of another run, a checkpoint of the same name
        command = ["publish", str(source), str(out), "--tables", "fp16", "--parity", "64", "--force"]
        before = len(list(out.iterdir()))
        assert [run_command(command), run_command(command)] == [0, 0]
        told_of = capsys.readouterr().out
        assert len(list(out.iterdir())) == before + 1 and told_of.count("already") == 1, told_of


@pytest.fixture
def followed(
    chain: tuple[list[Path], list[Path]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, Path]:
    """(a folder of a full export and two deltas, an empty cache of exports)"""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for number, source in enumerate((chain[0][0], *chain[1]), 1):
        shutil.copytree(source, tmp_path / "followed" / f"v{number}")
    return tmp_path / "followed", tmp_path / "cache" / "rayrec" / "exports"


def test_an_export_that_is_evicted_while_it_is_opened_is_made_again(
    chain: tuple[list[Path], list[Path]], followed: tuple[Path, Path]
) -> None:
    store, cache = ExportStore(followed[0]), followed[1]
    made = store.open(store.newest()).folder
    with ThreadPoolExecutor(1) as other, open(cache / "lock") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)
        opened = other.submit(lambda: store.open(store.newest()))
        time.sleep(0.3)  # it has seen the export, and waits for its turn
        shutil.rmtree(made)
        fcntl.flock(turn, fcntl.LOCK_UN)
        assert same_files(opened.result().folder, chain[0][2])


def test_a_damaged_version_that_the_chain_does_not_need_is_passed_over(
    chain: tuple[list[Path], list[Path]], followed: tuple[Path, Path]
) -> None:
    for number, name in ((1, "export.json"), (2, "delta.json")):  # between the versions of the chain
        shutil.copytree(followed[0] / f"v{number}", followed[0] / f"v{number}-5")
        (followed[0] / f"v{number}-5" / name).write_text("{")
    store = ExportStore(followed[0])
    assert same_files(store.open(store.newest()).folder, chain[0][2]) and store.gap is None
    shutil.rmtree(followed[1])
    shutil.rmtree(followed[0] / "v1-5")
    (followed[0] / "v2" / "delta.json").write_text("{")
    store = ExportStore(followed[0])
    assert store.newest().name == "v1"
    assert store.gap is not None and "a delta is lost" in store.gap and "v2-5/delta.json is damaged" in store.gap


class Listed(LocalFolder):
    """Counts listings."""

    count = 0

    def sub(self, name: str) -> Listed:
        return Listed(self._path / name)

    def parent(self) -> Listed:
        return Listed(self._path.absolute().parent)

    def names(self) -> list[str]:
        Listed.count += 1
        return super().names()


def test_a_long_chain_is_found_in_one_pass_and_ends(
    chain: tuple[list[Path], list[Path]], followed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """A cold replica lists each folder a few times, however long the chain is. After 100 deltas comes a full export."""
    root, same = followed[0], followed[0].parent / "same"
    shutil.copytree(chain[0][2], same)
    (same / "export.json").write_text(
        (same / "export.json").read_text().replace(read_delta(root / "v3").version, "v-4")
    )
    delta = write_delta(chain[0][2], same, root / "v4", read_delta(root / "v3"))
    for number in range(5, 102):
        shutil.copytree(root / "v4", root / f"v{number}")
        step = replace(delta, version=f"v-{number}", parent=f"v-{number - 1}", sequence=number - 1)
        (root / f"v{number}" / "delta.json").write_bytes(step.to_json())
    Listed.count, store = 0, ExportStore(Listed(root))
    newest = store.newest()
    assert newest.name == "v101" and store.gap is None
    assert [folder.name for folder in store.chain(newest)] == [f"v{number}" for number in range(1, 102)]
    assert Listed.count < 4 * 101
    assert run_command(["publish", str(chain[0][0]), str(root)]) == 0
    assert "full export, step 6" in capsys.readouterr().out


def test_a_full_export_is_published_after_a_damaged_version(
    chain: tuple[list[Path], list[Path]], followed: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    (followed[0] / "v3" / "delta.json").write_text("{")
    assert run_command(["publish", str(chain[0][2]), str(followed[0])]) == 0
    told = capsys.readouterr()
    assert "full export, step 10" in told.out and "v3/delta.json is damaged" in told.err
    store = ExportStore(followed[0])
    assert same_files(store.open(store.newest()).folder, chain[0][2]) and store.gap is None


def test_an_export_of_deltas_does_not_exceed_the_cache(followed: tuple[Path, Path]) -> None:
    store = ExportStore(followed[0], cache_bytes=1000)
    with pytest.raises(ExportError, match=r"does not fit .* cache_bytes is 1,000, .* raise cache_bytes"):
        store.open(store.newest())
    assert not [path for path in followed[1].iterdir() if path.is_dir()]


def test_a_run_is_rewound_to_a_time(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    store = CheckpointStore(copy / "checkpoints")
    before = {one.step: one for one in store.all()}
    with store.reader(before[8]) as reader:
        expected = {key: reader.tensor(key) for key in reader.index.tensors}
    to = datetime.fromtimestamp(before[8].manifest.time + 1e-3, UTC).isoformat()
    assert run_command(["rewind", str(copy), "--to", to]) == 0
    assert "rewound from step 10 to step 8" in capsys.readouterr().out
    newest = store.latest()
    assert newest is not None and newest.step == 8 and newest.name not in {one.name for one in before.values()}
    assert newest.extra == before[8].extra and newest.manifest.time == before[8].manifest.time
    with store.reader(newest) as reader:
        assert all(torch.equal(reader.tensor(key), tensor) for key, tensor in expected.items())
    assert run_command(["rewind", str(copy), "--to", to]) == 0
    assert "is of that time already" in capsys.readouterr().out
    assert run_command(["rewind", str(copy), "--to", "2001-01-01"]) != 0
    assert "no checkpoint of 2001-01-01T00:00:00+00:00 or before" in capsys.readouterr().err
    # The run goes on. What the rewind discarded does not come back, whatever time it has.
    later = replace(newest.manifest, attempt=newest.manifest.attempt + 1, time=before[10].manifest.time + 100)
    folder = copy / "checkpoints" / f"step_{12:08d}-{later.attempt:04d}"
    shutil.copytree(newest.path, folder)
    (folder / "manifest.json").write_bytes(replace(later, step=12).to_json())
    to = datetime.fromtimestamp(later.time - 1, UTC).isoformat()
    assert run_command(["rewind", str(copy), "--to", to]) == 0
    assert "rewound from step 12 to step 8" in capsys.readouterr().out
    (folder / "manifest.json").write_text("{")
    assert run_command(["rewind", str(copy), "--to", to]) == 0
    told = capsys.readouterr()
    assert "is of that time already" in told.out and f"{folder.name} is damaged" in told.err
