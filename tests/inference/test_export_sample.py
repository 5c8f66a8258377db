"""An export is compared on drawn rows: how many, from where, and with what of the tables."""

from __future__ import annotations

import dataclasses
import importlib
import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
import torch.nn.functional as F

from rayrec.inference import ExportError, ExportOptions
from rayrec.inference.tables import PartialTable
from rayrec.train import export_run
from tests.inference.runs import WEIGHTED, Sequences, train, trained_run, write_weighted
from tests.train import small

exporting = importlib.import_module("rayrec.inference.export")


@pytest.mark.parametrize("kind", ["bags", "sequences", "weighted"])
def test_a_sample_is_compared_as_all_rows_are(tmp_path: Path, kind: str) -> None:
    """Pooled features, sequences, and pooled ones with weights, which torch looks up in other ways."""
    if kind == "weighted":
        write_weighted(tmp_path)
        run, factory = train(tmp_path, **WEIGHTED), None
    else:
        factory = Sequences if kind == "sequences" else None
        run = train(tmp_path, factory=factory, **({} if factory is None else {"model": {}}))
    counts = (100, None, 301) if kind == "bags" else (100,)
    made = [
        export_run(run, tmp_path / str(rows), ExportOptions(parity=rows), factory=factory).parity for rows in counts
    ]
    assert made[0].sampled and made[0].recorded is None and 100 <= made[0].rows < 301
    assert all(parity.logit_max < 1e-6 for parity in made)
    for parity in made[1:]:
        assert not parity.sampled and parity.rows == 301 and parity.recorded is not None
        assert parity.trained == made[1].trained
    assert "rows sampled from the evaluation rows" in (tmp_path / "100" / "parity.html").read_text()
    assert json.loads((tmp_path / "100" / "parity.json").read_text())["sampled"] is True
    line = json.loads((run / "exports.jsonl").read_text().splitlines()[0])
    assert line["sampled"] is True and line["rows"] == made[0].rows


def test_a_number_that_a_format_cannot_hold_is_named_by_its_row_or_the_format_is_not_chosen(
    run: Path, tmp_path: Path
) -> None:
    trained = trained_run(run)

    class Large:
        """The run's weights with a number in each row of a table that no scale in 16 bits holds."""

        def __getattr__(self, name: str) -> object:
            return getattr(trained.weights, name)

        def read_rows(self, table: str, start: int, stop: int) -> torch.Tensor:
            rows = trained.weights.read_rows(table, start, stop)
            if table.endswith(".item"):
                rows[:, 0] = 1e8
            return rows

    large = dataclasses.replace(trained, weights=Large(), recorded=None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"table 'item', row 0: .* exceeds the range of fp16"):
        exporting.export(large, tmp_path / "fp16", ExportOptions(tables="fp16"))
    made = exporting.export(large, tmp_path / "auto", ExportOptions(tables="AUTO", force=True))
    assert {place.table: place.format.value for place in made.index.places}["item"] == "fp32"


def test_the_sample_is_from_all_files_and_few_rows_are_read(tmp_path: Path) -> None:
    small.write_all(tmp_path, rows=300)
    table = pq.read_table(tmp_path / "eval")
    for old in [*(tmp_path / "eval").iterdir()]:
        old.unlink()
    for number in range(100):
        part = table.set_column(table.column_names.index("age"), "age", [[number / 100] * len(table)])
        pq.write_table(part, tmp_path / "eval" / f"{number:03}.parquet")
    run = train(tmp_path)
    trained = trained_run(run)
    batches = trained.batches(1000)
    drawn, files = 0, set[float]()
    for batch in batches:
        drawn += batch.rows
        files |= set((batch.dense[:, 0] * 100).round().tolist())
        if drawn >= 1000:
            break
    assert len(files) > 20, "a sample of the first files would say nothing of the others"
    assert sum(batch.rows for batch in trained.batches(None)) == 30_100


def test_a_sample_ends_where_its_rows_of_tables_would_fill_the_memory(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exporting, "_SAMPLE_BYTES", 1000)
    parity = export_run(run, tmp_path / "model").parity
    assert parity.sampled and 0 < parity.rows < 301


def test_rows_that_are_there_are_looked_up_and_others_refused() -> None:
    table = torch.arange(40.0).view(10, 4)
    some = PartialTable.of(10, 4)
    for ids in ([7, 2], [2, 9]):
        assert not F.embedding(torch.tensor(ids), some).any()
    assert some.recorded_span(5, 8) == (7, 8) and some.recorded_span(2, 10) == (2, 10)
    assert some.recorded_span(3, 7) is None
    some.fill(0, table[:6])
    some.fill(6, table[6:])
    ids = torch.tensor([9, 2, 2])
    assert torch.equal(F.embedding(ids, some), table[ids])
    assert torch.equal(
        F.embedding_bag(ids, some, torch.tensor([0, 1]), mode="sum"),
        table[ids].cumsum(0)[[0, 2]] - torch.stack([torch.zeros(4), table[9]]),
    )
    with pytest.raises(ValueError, match="--parity all"):
        F.embedding(torch.tensor([3]), some)


def test_no_rows_are_no_sample() -> None:
    with pytest.raises(ExportError, match="--parity 0"):
        ExportOptions(parity=0)
