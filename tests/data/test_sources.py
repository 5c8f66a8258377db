"""Criteo's text files and the synthetic generator, from source to batches."""

from __future__ import annotations

import gzip
import runpy
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from rayrec.data import DataError, Manifest
from rayrec.data.tools.criteo import CATEGORIES, COLUMNS, NUMBERS, convert
from rayrec.data.tools.on_ray import each
from rayrec.data.tools.parquet_parts import Layout
from rayrec.train import load_config

ROOT = Path(__file__).parents[2]


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


@pytest.mark.parametrize("name", ["criteo", "synthetic"])
def test_prepared_data_fits_its_train_config(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    if name == "criteo":
        main = runpy.run_path(str(ROOT / "data/criteo/prepare.py"))["main"]
        assert main([str(write(tmp_path / "train.txt", lines(70))), "--rows-per-file", "10"]) == 0
        assert main([str(tmp_path / "nowhere.txt")]) == 1
    else:
        main = runpy.run_path(str(ROOT / "data/synthetic/generate.py"))["main"]
        assert main(["--rows", "700", "--files", "7"]) == 0
    config = load_config(ROOT / f"data/{name}/train.yaml")
    assert Manifest.of(config.data.train, config.data_schema).rows in (60, 600)
    tables = {t.features[0]: t.rows for t in config.tables}
    assert list(tables) == config.data_schema.sparse_names


def test_inputs_run_side_by_side_on_ray(running_ray: None) -> None:
    assert list(each(abs, [-3, 2, -1], on_ray=True)) == list(each(abs, [-3, 2, -1], on_ray=False)) == [3, 2, 1]

    def refuse(number: int) -> int:
        raise DataError("no", file=str(number))

    with pytest.raises(DataError, match="no") as caught:
        list(each(refuse, [7], on_ray=True))
    assert caught.value.file == "7"
