"""A run: configured in YAML or Python, trained, resumed, exported and served. This page is all of it in one program."""

import json
import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from rayrec.data import to_batch
from rayrec.inference import Export, ExportOptions, Model, export
from rayrec.modules import EmbeddingBagCollection, EmbeddingBagConfig
from rayrec.serve import ModelSpec, Service
from rayrec.torchrec.inference.quantize import read_exported_tables
from rayrec.train import Callback, Result, RunFolder, RunInfo, TrainConfig, Trainer, export_run, load_config
from rayrec.train.after.export import find_checkpoint, trained_of

CONFIG = """
name: clicks
data: {train: rows.parquet, eval: rows.parquet, read: {reader: local}}
schema:
  label: {column: clicked}
  dense: [{name: age}]
  sparse: [{name: user, mapping: {kind: hash}}, {name: item, mapping: {kind: hash}}]
tables:
  - {name: user, rows: 100, dim: 8, features: [user]}
  - {name: item, rows: 50, dim: 8, features: [item]}
model: {name: dlrm, args: {dense_arch: [8, 8], over_arch: [8, 1]}}
trainer: {num_workers: 0, epochs: 2, batch_size: 64}
storage: {path: runs}
"""


class PrintName(Callback):
    """Sends metrics wherever you like."""

    def on_start(self, run: RunInfo) -> None:
        print("run", run.name)


with tempfile.TemporaryDirectory() as name:
    folder, draw = Path(name), np.random.default_rng(0)
    user, item = draw.integers(0, 90, 2000), draw.integers(0, 40, 2000)
    rows = pa.table({"user": user, "item": item, "age": draw.random(2000), "clicked": (user + item) % 2})
    pq.write_table(rows, folder / "rows.parquet")
    (folder / "clicks.yaml").write_text(CONFIG)
    config: TrainConfig = load_config(folder / "clicks.yaml", ["trainer.epochs=3"])
    result: Result = Trainer(config, root=folder, callbacks=[PrintName()]).fit()
    assert result.steps == 96 and result.eval is not None
    losses = [line["loss"] for line in RunFolder(folder / "runs/clicks").read_metrics() if line["kind"] == "train"]

    exported = export_run(folder / "runs/clicks", folder / "model").folder
    model = Model(exported)
    schema, rows_of = config.data_schema, {"user": 100, "item": 50}
    with torch.inference_mode():
        scores = model.score(to_batch(rows.slice(0, 3), schema, rows_of))
    service = Service([ModelSpec(path=exported)])  # `rayrec serve` puts it behind HTTP
    body = json.dumps({"rows": rows.slice(0, 3).to_pylist()}).encode()
    (answered,) = service.score(body, "application/json").scores.values()
    np.testing.assert_allclose(answered, torch.sigmoid(scores).flatten(), rtol=1e-5)
    service.close()

    # The parts of `rayrec export`, for a model with tables in few bits; and its tables in a module of your own.
    trained = trained_of(*find_checkpoint(folder / "runs/clicks"))
    small: Export = export(trained, folder / "small", ExportOptions(tables="int8", force=True))
    print("largest difference of a logit:", small.parity.logit_max)
    tables = [EmbeddingBagConfig(rows, 8, name, feature_names=[name]) for name, rows in rows_of.items()]
    bags = read_exported_tables(torch.nn.Sequential(EmbeddingBagCollection(tables, device="meta")), small.folder)
    assert bags(to_batch(rows.slice(0, 3), schema, rows_of).sparse)["user"].shape == (3, 8)
