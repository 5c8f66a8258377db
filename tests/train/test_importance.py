"""What a model uses: the planted signal comes first, and what it never reads changes nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rayrec.cli import run
from tests.train.small import raw_config, write_all
from tests.train.test_fit import trainer


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose labels follow user and item, and the age a little, but no tag; the folder of its data is above."""
    folder = write_all(tmp_path_factory.mktemp("importance"), rows=4000)
    return trainer(folder, trainer__epochs=3).fit().folder


def test_what_the_labels_were_made_of_is_found(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["evaluate", str(trained), "--importance"]) == 0
    found = {part["name"]: part for part in json.loads((trained / "importance.json").read_text())["parts"]}
    assert {name: part["kind"] for name, part in found.items()} == {
        "user": "table", "item": "table", "tag": "table", "age": "number",
    }  # fmt: skip
    assert min(found[name]["ne"] for name in ("user", "item")) > 0.1 > found["age"]["ne"] > abs(found["tag"]["ne"])
    assert min(found[name]["auc"] for name in ("user", "item")) > 0.05
    text, report = capsys.readouterr().out, (trained / "report.html").read_text()
    assert "│ user " in text and "<h2>Permutation importance</h2>" in report and "<td>user</td>" in report
    assert list(found)[-1] == "tag" and report.index("<td>age</td>") < report.index("<td>tag</td>")


def test_it_is_the_same_every_time(trained: Path) -> None:
    found = []
    for _ in range(2):
        assert run(["evaluate", str(trained), "--importance"]) == 0
        found.append((trained / "importance.json").read_text())
    assert found[0] == found[1]


def test_rows_that_show_nothing_are_refused(trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = pq.read_table(trained.parents[1] / "eval")
    alike = rows.set_column(rows.column_names.index("label"), "label", pa.array([1] * len(rows)))
    pq.write_table(alike, tmp_path / "x.parquet")
    assert run(["evaluate", str(trained), "--data", str(tmp_path / "x.parquet"), "--importance"]) == 1
    assert "all evaluation rows have the same label" in capsys.readouterr().err
    folder = write_all(tmp_path / "other", rows=64)
    raw = raw_config(folder)["data"]
    del raw["eval"]
    bare = trainer(folder, data=raw, trainer__epochs=1).fit().folder
    assert run(["evaluate", str(bare), "--importance"]) == 1
    assert "no data.eval" in capsys.readouterr().err
