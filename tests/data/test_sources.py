"""Criteo's text files and the synthetic generator, from source to batches."""

from __future__ import annotations

import gzip
import json
import runpy
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.data import DataError, Layout, Manifest, Mapping, Schema
from rayrec.storage.parallel import one_by_one
from rayrec.train import Trainer, load_config

ROOT = Path(__file__).parents[2]
CRITEO = runpy.run_path(str(ROOT / "data/criteo/prepare.py"))
CATEGORIES, COLUMNS, NUMBERS, convert = (CRITEO[name] for name in ("CATEGORIES", "COLUMNS", "NUMBERS", "convert"))


def lines(rows: int, seed: int = 0) -> list[list[str]]:
    rng = np.random.default_rng(seed)

    def row() -> list[str]:
        counts = ["" if rng.random() < 0.2 else str(rng.integers(-2, 5000)) for _ in NUMBERS]
        ids = ["" if rng.random() < 0.1 else f"{rng.integers(0, 1 << 32):08x}" for _ in CATEGORIES]
        return [str(rng.integers(0, 2)), *counts, *ids]

    return [row() for _ in range(rows)]


def write(path: Path, rows: list[list[str]]) -> Path:
    text = "".join("\t".join(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
    return path


@pytest.mark.parametrize("name", ["train.txt", "day_3.gz"])
def test_criteo_is_converted_value_by_value(tmp_path: Path, name: str) -> None:
    rows = lines(250)
    layout = Layout(rows_per_file=100, row_group_rows=30)
    files = convert(write(tmp_path / name, rows), tmp_path / "out", layout)
    stem = name.split(".")[0]
    assert [f.name for f in files] == [f"{stem}-0000{n}.parquet" for n in range(3)]
    assert sorted(f.name for f in (tmp_path / "out").iterdir()) == [f.name for f in files]
    found = [row for f in files for row in pq.read_table(f).to_pylist()]
    for row, wanted in zip(found, rows, strict=True):
        values = dict(zip(COLUMNS, wanted, strict=True))
        assert row["label"] == int(values["label"])
        assert [row[n] for n in NUMBERS] == [int(values[n]) if values[n] else None for n in NUMBERS]
        assert [row[n] for n in CATEGORIES] == [int(values[n], 16) if values[n] else None for n in CATEGORIES]
    assert pq.ParquetFile(files[0]).metadata.num_row_groups == 4


def test_wrong_criteo_files_are_named(tmp_path: Path) -> None:
    good = lines(3)
    short = [*good[:2], [*good[2][:20], "xyz", *good[2][21:]]]
    with pytest.raises(DataError, match="8 hexadecimal digits") as caught:
        convert(write(tmp_path / "a.txt", short), tmp_path / "out")
    assert (caught.value.row, caught.value.column, caught.value.value) == (2, COLUMNS[20], "'xyz'")
    other = [[*good[0][:20], "0000000g", *good[0][21:]]]
    with pytest.raises(DataError, match="8 hexadecimal digits"):
        convert(write(tmp_path / "b.txt", other), tmp_path / "out")
    with pytest.raises(DataError, match="not a Criteo file"):
        convert(write(tmp_path / "c.txt", [row[1:] for row in good]), tmp_path / "out")
    with pytest.raises(DataError, match="does not exist"):
        convert(tmp_path / "nowhere.txt", tmp_path / "out")


def test_synthetic_data_fits_its_train_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    main = runpy.run_path(str(ROOT / "data/synthetic/generate.py"))["main"]
    assert main(["--rows", "700", "--files", "7"]) == 0
    config = load_config(ROOT / "data/synthetic/train.yaml")
    assert Manifest.of(config.data.train, config.data_schema).rows == 600
    assert [table.features[0] for table in config.tables] == config.data_schema.sparse_names


def test_criteo_goes_from_its_text_to_a_trained_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what real rows have: counts of -1 and less, empty fields, also the last, so that a line ends in a tab."""
    monkeypatch.chdir(tmp_path)
    rows = lines(210)
    rows[0][2], rows[1][2], rows[2][2] = "-1", "-2", "-3"
    rows[0][-1], rows[1][1:] = "", [""] * 39
    main = CRITEO["main"]
    assert main([str(write(tmp_path / "train.txt", rows))]) == 0
    small = [f"tables.C{n}.rows=1000" for n in (3, 4, 10, 12, 16, 21, 24, 26)]
    config = load_config(
        ROOT / "data/criteo/train.yaml", [*small, "trainer.num_workers=0", "trainer.batch_size=60", "storage.path=runs"]
    )
    batch = Mapping.from_config(config).to_batch(pq.read_table("data/criteo/parquet/train"))
    i2 = [row[2] for row in rows[:180]]
    assert batch.dense[:, 1].tolist() == pytest.approx([np.log1p(max(0, int(one or 0))) for one in i2])
    Trainer(config).fit()
    result = json.loads((tmp_path / "runs/criteo/result.json").read_text())
    assert result["eval"]["samples"] == 30


@pytest.mark.parametrize(("rows", "per_file", "split"), [(70, 10, (60, 10)), (3, 100, (2, 1)), (45, 10, (39, 6))])
def test_the_last_rows_are_set_aside_whatever_the_files(
    tmp_path: Path, rows: int, per_file: int, split: tuple[int, int]
) -> None:
    main = CRITEO["main"]
    source, out = write(tmp_path / "train.txt", lines(rows)), tmp_path / "out"
    assert main([str(source), "--out", str(out), "--rows-per-file", str(per_file)]) == 0
    assert sorted(path.name for path in out.iterdir()) == ["eval", "train"]
    parts = [pq.read_table(out / part) for part in ("train", "eval")]
    assert tuple(part.num_rows for part in parts) == split
    convert(source, tmp_path / "whole")
    assert pa.concat_tables(parts).equals(pq.read_table(tmp_path / "whole"))


def test_a_preparation_that_fails_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main = CRITEO["main"]
    out = tmp_path / "out"
    good, one = write(tmp_path / "a.txt", lines(20)), write(tmp_path / "one.txt", lines(1))
    for sources, message in [([good, tmp_path / "nowhere.txt"], "does not exist"), ([one], "cannot split 1 rows")]:
        assert main([*map(str, sources), "--out", str(out)]) == 1
        assert message in capsys.readouterr().err
        assert not out.exists()
    assert main([str(good), "--out", str(out)]) == 0
    assert main([str(good), "--out", str(out)]) == 1 and "already contains data" in capsys.readouterr().err
    assert sorted(path.name for path in out.iterdir()) == ["eval", "train"]


def test_a_number_that_is_refused_is_told_before_and_after_its_transforms() -> None:
    steps = [{"kind": "log1p"}, {"kind": "clip", "lowest": 0.0}]
    schema = Schema.model_validate({"dense": [{"name": "I2", "transforms": steps}]})
    with pytest.raises(DataError, match=r"put {kind: clip, .*} before it") as caught:
        Mapping(schema, {}, labels=False).to_batch({"I2": [3, -1]})
    assert (caught.value.row, caught.value.value) == (1, "-1, nan after log1p and clip")
    in_order = schema.model_validate({"dense": [{"name": "I2", "transforms": steps[::-1]}]})
    assert Mapping(in_order, {}, labels=False).to_batch({"I2": [0, -1]}).dense.tolist() == [[0.0], [0.0]]


def test_inputs_run_side_by_side_on_ray(running_ray: None) -> None:
    for on_ray in (True, False):
        assert list(one_by_one(abs, [-3, 2, -1], on_ray=on_ray)) == [3, 2, 1]

    def refuse(number: int) -> int:
        raise DataError("no", file=str(number))

    with pytest.raises(DataError, match="no") as caught:
        list(one_by_one(refuse, [7], on_ray=True))
    assert caught.value.file == "7"
