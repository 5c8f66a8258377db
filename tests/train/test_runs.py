"""`rayrec runs`: what is listed, what differs, and the page of several runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from rayrec.cli import run as command
from tests.train.small import write_all
from tests.train.test_fit import records, trainer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two runs that differ in three fields, and one that has only begun."""
    folder = write_all(tmp_path_factory.mktemp("runs"), rows=300)
    trainer(folder, name="one").fit()
    trainer(folder, name="two", optimizers__dense__lr=0.003, trainer__epochs=1, tables=TABLES).fit()
    begun = folder / "runs" / "three"
    begun.mkdir()
    (begun / "config.yaml").write_text("name: three\n")
    return folder / "runs"


TABLES = [
    {"name": "user", "rows": 40, "dim": 8, "features": ["user"]},
    {"name": "item", "rows": 90, "dim": 8, "features": ["item"]},
    {"name": "tag", "rows": 7, "dim": 8, "pooling": "mean", "features": ["tags"]},
]


def test_runs_are_listed_with_their_last_figures(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(["runs", "list", str(folder)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (one,) = [line for line in lines if " one " in line]
    auc = records(folder / "one", "eval")[-1]["auc"]
    assert "finished" in one and f"{auc:.4f}" in one
    (three,) = [line for line in lines if " three " in line]
    assert "unfinished" in three
    assert command(["runs", "list", str(folder / "nowhere")]) == 1


def test_runs_are_compared_in_a_table_and_on_a_page(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "both.html"
    assert command(["runs", "compare", str(folder / "one"), str(folder / "two"), "--html", str(page)]) == 0
    shown = capsys.readouterr().out
    (rates,) = (line for line in shown.splitlines() if "optimizers.dense.lr" in line)
    assert "0.01" in rates and "0.003" in rates and "tables.item.rows" in shown and "trainer.epochs" in shown
    assert "trainer.batch_size" not in shown, "it is the same"
    text = page.read_text()
    assert text.count("<svg") >= 8 and "AUC, two" in text and "trainer.epochs" in text
    assert "http" not in text.replace("http://www.w3.org", "")
    assert command(["runs", "compare", str(folder / "one")]) == 2
    assert command(["runs", "compare", str(folder / "one"), str(tmp_path)]) == 1
