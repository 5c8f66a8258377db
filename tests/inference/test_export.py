"""An exported folder scores as the trainer's evaluation does."""

from __future__ import annotations

import json
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rayrec.data import DataError, Mapping
from rayrec.inference import ExportError, ExportOptions, Model
from rayrec.models import Batch
from rayrec.quant import TableFormat
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import export_run, write_report
from tests.inference.runs import TWO_LABELS, Sequences, TwoTowers, command, train, trainer_scores, write_config
from tests.ranks import Ranks
from tests.train import small


def assert_scores_equal(model: Model, run: Path, atol: float, factory: Any = None) -> None:
    batches = trainer_scores(run, factory)
    assert sum(batch.rows for batch, _ in batches) == 301
    for batch, logits in batches:
        torch.testing.assert_close(model.score(batch), logits, rtol=0, atol=atol)


def test_eager_fp32_is_the_trainers_evaluation_to_the_last_bit(run: Path, exported: Path) -> None:
    assert_scores_equal(Model(exported), run, atol=0)
    parity = Model(exported).parity()
    assert parity["within_limits"] and parity["rows"] == 301
    assert parity["recorded"]["auc"] == parity["exported"]["auc"]
    assert "within its limits" in (exported / "parity.html").read_text()


def test_nothing_in_the_folder_is_pickled(exported: Path) -> None:
    with zipfile.ZipFile(exported / "graph.pt2") as archive:
        pickles = [info.filename for info in archive.infolist() if info.filename.endswith((".pt", ".pkl"))]
        assert all(archive.getinfo(name).file_size == 0 for name in pickles)
    assert {path.suffix for path in exported.rglob("*") if path.is_file()} == {".json", ".bin", ".pt2", ".html"}


def test_odd_batches_score_as_single_rows_do(run: Path, exported: Path) -> None:
    """One row, none, and rows without any id."""
    model = Model(exported)
    batch, logits = trainer_scores(run)[0]
    alone = [model.score(rows_of(batch, i, i + 1)) for i in range(5)]
    torch.testing.assert_close(torch.cat(alone), logits[:5], rtol=1e-5, atol=1e-6)
    assert model.score(rows_of(batch, 0, 0)).shape == (0,)
    keys = batch.sparse.keys()
    nothing = KeyedJaggedTensor(keys, torch.empty(0, dtype=torch.int64), lengths=torch.zeros(2 * 3, dtype=torch.int64))
    assert model.score(Batch(torch.zeros(2, 1), nothing, torch.zeros(2))).isfinite().all()


def rows_of(batch: Batch, start: int, stop: int) -> Batch:
    parts = {}
    for key in batch.sparse.keys():
        jagged = batch.sparse[key]
        first, last = int(jagged.offsets()[start]), int(jagged.offsets()[stop])
        parts[key] = (jagged.values()[first:last], jagged.lengths()[start:stop])
    sparse = KeyedJaggedTensor(
        list(parts), torch.cat([v for v, _ in parts.values()]), lengths=torch.cat([n for _, n in parts.values()])
    )
    return Batch(batch.dense[start:stop], sparse, batch.label[start:stop])


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("id", -1, r"feature 'item', example 2: id -1 is outside the rows \[0, 80\) of table 'item'"),
        ("id", 80, "id 80 is outside"),
        ("dense", float("nan"), "dense number 0 of row 1 is nan"),
        ("missing", 0, "no feature 'tags'"),
        ("width", 0, "reads 1 numbers"),
    ],
)
def test_bad_batches_are_refused_before_the_kernel(exported: Path, field: str, value: float, text: str) -> None:
    ids, dense, keys = torch.zeros(9, dtype=torch.int64), torch.zeros(3, 1), ["user", "item", "tags"]
    if field == "id":
        ids[5] = int(value)
    elif field == "dense":
        dense[1] = value
    elif field == "missing":
        keys[2] = "other"
    else:
        dense = torch.zeros(3, 2)
    batch = Batch(dense, KeyedJaggedTensor(keys, ids, lengths=torch.ones(9, dtype=torch.int64)), torch.zeros(3))
    with pytest.raises(ValueError, match=text):
        Model(exported).score(batch)


def test_raw_rows_are_mapped_as_in_training_with_the_folders_own_vocabulary(tmp_path: Path) -> None:
    small.write_all(tmp_path, rows=300)
    pq.write_table(pa.table({"id": [f"city {i}" for i in (4, 2, 0, 7)]}), tmp_path / "cities.parquet")
    sparse = [*small.RAW["schema"]["sparse"]]
    vocabulary = {"kind": "vocabulary", "path": f"file://{tmp_path}/cities.parquet", "oov_rows": 2}
    sparse.append({"name": "city", "mapping": vocabulary})
    tables = [*small.RAW["tables"], {"name": "city", "rows": 6, "dim": 8, "features": ["city"]}]
    run = train(tmp_path, schema__sparse=sparse, tables=tables, model__name="dcn")
    folder = export_run(run, tmp_path / "model", ExportOptions(tables="fp16")).folder
    (tmp_path / "cities.parquet").unlink()
    for tensors in (run / "checkpoints").rglob("*.safetensors"):
        tensors.rename(tensors.with_suffix(".away"))  # the tables are not read before the error
    with pytest.raises(DataError, match=r"the file is gone \(file file://.*cities\.parquet\).*restore it"):
        export_run(run, tmp_path / "none")
    for tensors in (run / "checkpoints").rglob("*.away"):
        tensors.rename(tensors.with_suffix(".safetensors"))
    moved = folder.rename(tmp_path / "moved")
    model = Model(moved)
    mapping = Mapping.from_config(model.mapping_config(), labels=False)
    table = pa.concat_tables([pq.read_table(path) for path in sorted((tmp_path / "eval").iterdir())])
    scores = model.score(mapping.to_batch(table))
    expected = torch.cat([logits for _, logits in _scores_with(run, moved)])
    torch.testing.assert_close(scores, expected, rtol=0, atol=2e-3)


def _scores_with(run: Path, model: Path) -> list[tuple[Batch, torch.Tensor]]:
    """The trainer's, with the vocabulary that the export kept."""
    config = run / "config.yaml"
    path = json.loads(json.dumps(str(next((model / "vocabularies").glob("*.parquet")))))
    config.write_text(config.read_text().replace(f"file://{run.parent.parent}/cities.parquet", path))
    return trainer_scores(run)


def test_a_users_own_model_of_several_collections_in_int8(tmp_path: Path) -> None:
    run = train(tmp_path, factory=TwoTowers, model={})
    made = export_run(run, tmp_path / "model", ExportOptions(tables="int8"), factory=TwoTowers)
    assert {place.format for place in made.index.places} == {TableFormat.INT8}
    assert made.parity.bytes["tables"] < made.parity.bytes["fp32"] / 2
    assert made.parity.logit_max < 0.05
    assert_scores_equal(Model(made.folder), run, atol=0.05, factory=TwoTowers)


def test_a_users_own_model_of_sequences_scores_to_the_last_bit_as_an_export_of_format_1(
    tmp_path: Path,
) -> None:
    """One that looks at ids itself has no context, as no export of format 1 has."""
    run = train(tmp_path, factory=Sequences, model={})
    folder = export_run(run, tmp_path / "model", factory=Sequences).folder
    assert_scores_equal(Model(folder), run, atol=0, factory=Sequences)
    index = json.loads((folder / "export.json").read_text())
    assert index["format"] == 4 and index["inputs"].pop("context") is None
    (folder / "export.json").write_text(json.dumps({**index, "format": 1}))
    assert_scores_equal(Model(folder), run, atol=0, factory=Sequences)


def test_several_labels_and_tables_chosen_by_measured_loss(tmp_path: Path) -> None:
    run = train(tmp_path, **TWO_LABELS)
    options = ExportOptions(tables="AUTO", budget=0.5, calibrate="platt", force=True)
    assert {*(export_run(run, tmp_path / "calibrated", options).parity.calibration or {})} == {"click", "like"}
    made = export_run(run, tmp_path / "model", ExportOptions(tables="AUTO", budget=0.5, force=True))
    assert made.parity.bytes["tables"] <= 0.5 * made.parity.bytes["fp32"] + 64 * 3
    model = Model(made.folder)
    assert model.labels == ("click", "like")
    assert set(made.parity.exported["tasks"]) == {"click", "like"}
    assert_scores_equal(model, run, atol=0.2)


@pytest.mark.parametrize("kind", ["platt", "isotonic"])
def test_calibrated_scores_match_the_frequencies_of_rows_and_keep_their_order(
    run: Path, tmp_path: Path, kind: str
) -> None:
    """On rows with a third of the positives of the run's."""
    rows_with_labels(run, tmp_path / "rows", lambda value, number: value and number % 3 == 0)
    said = command("export", run, tmp_path / "model", "--calibrate", kind, "--data", tmp_path / "rows")
    assert f"calibrated label ({kind}): log loss " in said
    model = Model(tmp_path / "model")
    assert model.index.calibration == kind and model.parity()["within_limits"]
    changes = model.parity()["calibration"]["label"]
    assert changes["logloss_after"] < changes["logloss_before"] and changes["ece_after"] < changes["ece_before"] / 2
    (batch, trained), *_ = trainer_scores(run)
    logits = model.score(batch)
    assert torch.equal(logits.argsort(), trained.argsort()) and not torch.allclose(logits, trained, atol=0.1)
    assert model.parity()["exported"]["calibration"] == pytest.approx(1, abs=0.02)
    if kind == "platt":
        scale = (logits[1:] - logits[0]) / (trained[1:] - trained[0])
        torch.testing.assert_close(scale, scale[:1].expand_as(scale), rtol=1e-3, atol=1e-3)
    with pytest.raises(ExportError, match="--calibrate plat: choose one of platt, isotonic"):
        ExportOptions(calibrate="plat")


@pytest.mark.parametrize("kind", ["platt", "isotonic"])
def test_rows_that_cannot_calibrate_are_refused(run: Path, tmp_path: Path, kind: str) -> None:
    rows_with_labels(run, tmp_path / "inverted", lambda value, _: 1 - value)
    rows_with_labels(run, tmp_path / "negatives", lambda value, _: 0)
    for rows, problem in (("inverted", "higher scores of label 'label' do not mean"), ("negatives", "0 positives")):
        with pytest.raises(ValueError, match=f"--calibrate: .*{problem}"):
            export_run(run, tmp_path / "model", ExportOptions(calibrate=kind), data=str(tmp_path / rows))


def rows_with_labels(run: Path, folder: Path, label: Callable[[int, int], int]) -> None:
    """The evaluation rows of a run with other labels: of each label and row number."""
    shutil.copytree(run.parents[1] / "eval", folder)
    for file in folder.glob("*.parquet"):
        rows = pq.read_table(file)
        labels = [int(label(value, number)) for number, value in enumerate(rows.column("label").to_pylist())]
        place = rows.column_names.index("label")
        pq.write_table(rows.set_column(place, "label", pa.array(labels, rows.schema.field("label").type)), file)


def test_a_model_trained_with_the_pairwise_loss(tmp_path: Path) -> None:
    run = train(tmp_path, model__loss="pairwise")
    assert_scores_equal(Model(export_run(run, tmp_path / "model").folder), run, atol=0)


def test_a_run_of_two_ranks_is_exported_table_by_table(tmp_path: Path) -> None:
    small.write_all(tmp_path, rows=300)
    kinds = {"user": "row_wise", "item": "column_wise", "tag": "data_parallel"}
    raw = small.raw_config(
        tmp_path,
        trainer__epochs=1,
        trainer__num_workers=2,
        model={"name": "deepfm", "args": {"deep_arch": [16, 1]}},
        sharding={"constraints": {name: {"sharding_types": [kind]} for name, kind in kinds.items()}},
    )
    run = write_config(raw)
    ranks = Ranks(2)
    try:
        outcome, _ = ranks.run(small.fit_on_rank, raw)
    finally:
        ranks.close()
    made = export_run(run, tmp_path / "model")
    assert made.parity.exported["auc"] == pytest.approx(outcome["eval"]["auc"], abs=1e-6)
    assert made.parity.exported["logloss"] == pytest.approx(outcome["eval"]["logloss"], abs=1e-7)


def test_the_runs_report_links_to_its_exports(run: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run, tmp_path / "run")
    (copy / "exports.jsonl").unlink(missing_ok=True)
    kept = export_run(copy, tmp_path / "a folder" / "int8 & more", ExportOptions(tables="int8"))
    removed = export_run(copy, tmp_path / "removed")
    shutil.rmtree(removed.folder)
    write_report(copy)
    page = (copy / "report.html").read_text()
    (link,) = re.findall(r"<a href='([^']+)'", page)
    assert (copy / unquote(link)).samefile(kept.folder / "parity.html")
    assert f"title='{removed.folder}'>removed (removed)" in page
    assert f"{kept.parity.exported['auc']:.6f}" in page and kept.index.version in page


@pytest.mark.long
def test_the_compiled_graph_of_bfloat16_layers_stays_near(run: Path, tmp_path: Path) -> None:
    made = export_run(run, tmp_path / "model", ExportOptions(target="aoti", dense="bf16", force=True))
    model = Model(made.folder)
    assert model.target == "aoti"
    assert_scores_equal(model, run, atol=0.1)
    assert_scores_equal(Model(made.folder, target="eager"), run, atol=0.1)
