"""Every kind of feature and mapping: an export scores as the trainer's evaluation, to the last bit.

`models/test_every_model.py` exports every built-in ranker.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml

from rayrec import cli
from rayrec.inference import ExportOptions, Model
from rayrec.models import Batch
from rayrec.quant import TableFormat
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import Trainer, export_run, parse_config
from tests.inference.runs import trainer_scores, write_weighted
from tests.train import small

ARGS: dict[str, dict[str, Any]] = {
    "dlrm": {"dense_arch": [16, 6], "over_arch": [16, 1]},
    "dcn": {"dense_arch": [8], "over_arch": [16, 1]},
    "deepfm": {"deep_arch": [16, 1]},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Single ids, lists with weights, words; empty lists among them."""
    root = write_weighted(tmp_path_factory.mktemp("data"))
    pq.write_table(pa.table({"id": [f"city {i}" for i in (4, 2, 0, 7)]}), root / "cities.parquet")
    return root


def schema_of(data: Path, weighted: bool) -> list[dict[str, Any]]:
    tags: dict[str, Any] = {"name": "tags", "kind": "id_list", "mapping": {"kind": "identity"}}
    if weighted:
        tags |= {"kind": "weighted_id_list", "weight_column": "tag_weights"}
    vocabulary = {"kind": "vocabulary", "path": str(data / "cities.parquet"), "oov_rows": 2}
    return [
        {"name": "user", "mapping": {"kind": "identity"}},
        {"name": "item", "mapping": {"kind": "hash", "seed": 3}},
        tags,
        {"name": "city", "mapping": vocabulary},
    ]


def tables_of(name: str) -> list[dict[str, Any]]:
    """Of any widths where the model takes them; sums and means; a feature that two tables read."""
    dims = [7, 12, 6, 4, 9] if name == "dcn" else [6] * 5
    kinds = [("user", small.USERS, "sum", "user"), ("item", 80, "mean", "item"), ("tag", small.TAGS, "mean", "tags")]
    kinds += [("city", 6, "sum", "city"), ("tag_sum", small.TAGS, "sum", "tags")]
    return [
        {"name": table, "rows": rows, "dim": dim, "pooling": pooling, "features": [feature]}
        for (table, rows, pooling, feature), dim in zip(kinds, dims, strict=True)
    ]


RUNS = [("dlrm", False), ("dcn", True), ("deepfm", True)]


@pytest.fixture(scope="module", params=RUNS, ids=lambda of: of[0] + (" weighted" if of[1] else ""))
def run(request: pytest.FixtureRequest, data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name, weighted = request.param
    raw = small.raw_config(
        data,
        trainer__epochs=1,
        schema__sparse=schema_of(data, weighted),
        tables=tables_of(name),
        model={"name": name, "args": ARGS[name]},
        storage__path=str(tmp_path_factory.mktemp("runs")),
    )
    return Trainer(parse_config(raw)).fit().folder


def test_fp32_is_the_trainers_evaluation_and_odd_batches_are_finite(run: Path, tmp_path: Path) -> None:
    model = Model(export_run(run, tmp_path / "model").folder)
    scored = trainer_scores(run)
    assert sum(batch.rows for batch, _ in scored) == 301
    for batch, logits in scored:
        torch.testing.assert_close(model.score(batch), logits, rtol=0, atol=0)
    batch, logits = scored[0]
    for rows in (1, 0):  # a batch of one, and no ids at all
        keys, weighted = batch.sparse.keys(), batch.sparse.weights_or_none() is not None
        nothing = KeyedJaggedTensor(
            keys,
            torch.empty(0, dtype=torch.int64),
            torch.empty(0) if weighted else None,
            lengths=torch.zeros(len(keys) * rows, dtype=torch.int64),
            stride=rows,
        )
        found = model.score(Batch(torch.zeros(rows, 1), nothing, torch.zeros(rows)))
        assert found.shape == (rows,) and bool(found.isfinite().all())


def test_bfloat16_layers_are_counted_and_stay_near(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["export", str(run), str(tmp_path / "model"), "--dense", "bf16", "--force"]) == 0
    index = Model(tmp_path / "model").index
    assert index.dense_parameters is not None
    counts = f"{index.bf16_parameters:,} of {index.dense_parameters:,} dense parameters in bf16"
    assert counts in capsys.readouterr().out
    # all but the logits' layer of 16 and 1, and the FM part of deepfm, which sums vectors
    model = yaml.safe_load((run / "config.yaml").read_text())["model"]["name"]
    other = 7 * 6 + 1 if model == "deepfm" else 0
    assert index.dense_parameters - index.bf16_parameters == 17 + other


@pytest.mark.parametrize("run", [("dcn", True)], indirect=True)
def test_few_bits_stay_near_and_a_table_of_an_odd_width_becomes_int8(run: Path, tmp_path: Path) -> None:
    made = export_run(run, tmp_path / "model", ExportOptions(tables="int4", force=True))
    for place in made.index.places:
        assert place.format is (TableFormat.INT8 if place.dim % 2 else TableFormat.INT4), place.table
    assert abs(made.parity.exported["auc"] - made.parity.trained["auc"]) < 0.01, "301 rows tell no more"
