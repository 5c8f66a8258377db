"""What takes Parquet takes CSV and JSON lines too, and makes the same of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv
import pyarrow.parquet as pq
import pytest
import yaml

from rayrec.cli import run
from rayrec.data import DataError, count_column
from rayrec.data.formats.find_parquet import find_parquet
from rayrec.train import Result
from tests.train import small
from tests.train.pretended_ray import PretendedRay, pretended

__all__ = ["pretended"]


def as_jsonl(table: pa.Table, path: Path) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in table.to_pylist()))


WRITE = {"parquet": pq.write_table, "csv": pacsv.write_csv, "jsonl": as_jsonl}
DAYS = (1, 2, 3)
SCHEMA = {
    "label": {"column": "label"},
    "dense": [{"name": "age"}],
    "sparse": [{"name": name, "mapping": {"kind": "hash"}} for name in ("user", "city")],
}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Three days of rows in each format, a config for each that trains day by day, and an export of the Parquet's."""
    root = tmp_path_factory.mktemp("formats")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        patch.chdir(root)
        for kind, write in WRITE.items():
            for day in DAYS:
                table = small.table(150, seed=day).select(["label", "age", "user", "city", "at", "row"])
                table = table.set_column(1, "age", pc.round(table["age"].cast("double"), 3))
                (folder := root / kind / f"day={day}").mkdir(parents=True)
                write(table, folder / f"x.{kind}")
            raw = small.raw_config(root, name=kind, schema=SCHEMA)
            raw["data"] = {"train": str(root / kind), "progressive": "day", "read": {"reader": "local"}}
            raw["tables"] = [{"name": name, "rows": 50, "dim": 8, "features": [name]} for name in ("user", "city")]
            raw["trainer"].pop("epochs")
            (root / f"{kind}.yaml").write_text(yaml.safe_dump(raw))
        assert run(["train", str(root / "parquet.yaml")]) == 0
        words = ["export", str(root / "runs" / "parquet"), str(root / "export"), "--data", str(root / "parquet")]
        assert run(words) == 0
        yield root


def made(words: str, root: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> Any:
    """What a command printed, or the rows that it wrote to `OUT`."""
    out = root / f"out-{kind}.parquet"
    capsys.readouterr()
    assert (
        run(words.format(data=root / kind, config=root / f"{kind}.yaml", out=out, export=root / "export").split()) == 0
    )
    if not out.exists():
        return capsys.readouterr().out
    files = sorted(out.rglob("*.parquet")) if out.is_dir() else [out]
    rows = [row for file in files for row in pq.ParquetFile(file).read().to_pylist()]
    shutil.rmtree(out) if out.is_dir() else out.unlink()
    return rows


COMMANDS = {
    "inspect": "data inspect {data}",
    "check": "data check {config} --json",
    "vocabulary": "data vocabulary {data} --column city --out {out}",
    "sequence": "data sequence {data} --out {out} --user user --time at --column city",
    "predict": "predict {export} {data} {out} --columns row,label",
}


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_makes_of_other_formats_what_it_makes_of_parquet(
    root: Path, kind: str, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found, expected = (made(COMMANDS[command], root, one, capsys) for one in (kind, "parquet"))
    assert found == expected and found


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_run_goes_through_days_of_other_formats(root: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Also the day that comes later, alone of which something is made then."""
    folder, later = root / "runs" / kind, root / kind / "day=4"
    expected = Result.from_dict(folder, json.loads((root / "runs" / "parquet" / "result.json").read_text()))
    assert run(["train", str(root / f"{kind}.yaml")]) == 0
    found = Result.from_dict(folder, json.loads((folder / "result.json").read_text()))
    assert (found.train["samples"], found.eval) == (expected.train["samples"], expected.eval)
    before = {path: path.stat().st_mtime_ns for path in (folder / "converted").rglob("*.parquet")}
    assert len(before) == 3
    shutil.copytree(root / kind / "day=3", later)
    try:
        assert run(["train", str(root / f"{kind}.yaml")]) == 0
    finally:
        shutil.rmtree(later)
    now = {path: path.stat().st_mtime_ns for path in (folder / "converted").rglob("*.parquet")}
    assert len(now) == 4 and before.items() <= now.items()


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_an_index_of_other_formats_is_refused(root: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It would name files of one user's cache."""
    for more in ([], ["--out", str(root / "index.arrow")], [str(root / "parquet")]):
        out = ["--out", str(root / "index.arrow")] if len(more) == 1 else []
        assert run(["data", "index", str(root / kind), *more, *out]) == 1
        told = capsys.readouterr().err
        assert "an index covers Parquet files; this file is" in told and f"{kind}/day=1/x.{kind}" in told
        assert "rayrec data convert" in told
    assert not (root / "index.arrow").exists() and not list((root / kind).glob("_*"))


def test_a_cluster_of_several_nodes_is_given_nothing_of_a_users_cache(
    root: Path, tmp_path: Path, pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    pretended.nodes = [{"Alive": True}, {"Alive": False}]
    monkeypatch.setattr("rayrec.storage.parallel._ray_has_room", lambda: False)
    assert len(find_parquet(str(root / "csv"))) == 3, "one node, and one that is gone"
    pretended.nodes = [{"Alive": True}, {"Alive": True}]
    assert len(find_parquet(str(root / "parquet"))) == 3
    for look in (
        lambda: find_parquet(str(root / "csv")),
        lambda: count_column(str(root / "csv"), "city", tmp_path / "v.parquet", on_ray=True),
    ):
        with pytest.raises(DataError, match="that other nodes cannot read") as caught:
            look()
        assert "rayrec data convert" in str(caught.value) and caught.value.file == str(root / "csv/day=1/x.csv")
