"""Permutation importance: how much metrics degrade if the values of a table or dense feature are permuted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from rayrec.data import Manifest, Schema
from rayrec.data import Mapping as RowMapping
from rayrec.data.stream.reading import read_window
from rayrec.inference import Model
from rayrec.metrics import LabelMetrics
from rayrec.train.after.export import exported_run
from rayrec.train.config.file import parse_config
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import TrainError
from rayrec.train.report import write_report
from rayrec.train.run.choice import NEWEST
from rayrec.train.run.config import config_of_run
from rayrec.train.run.folder import RunFolder, write_json

ROWS = 50_000
_SEED = 0


def importance_of_run(
    run_dir: str | Path, data: str | None = None, *, allow_code: bool = False, checkpoint: str = NEWEST
) -> list[dict[str, Any]]:
    """Measure permutation importance on a sample of evaluation rows.

    Writes `importance.json` to the run folder and rewrites the report. Exports the checkpoint to the run's `exports/`
    first if needed.

    Args:
        data: Parquet file, folder or glob; default: the run's `data.eval`.
        checkpoint: see `choose`.

    Returns:
        Most important first: `name`, `kind` (table or number), `ne` (increase of NE) and `auc` (decrease of AUC). With
        several labels, of the first one.

    Raises:
        ValueError: see `export_run`; no evaluation rows.
    """
    folder = RunFolder(Path(run_dir).absolute())
    raw = config_of_run(folder, allow_code=allow_code, data=data)
    config = parse_config(raw)
    model = Model(exported_run(run_dir, allow_code, checkpoint))
    measured = _importance(model, config)
    write_json(folder.path / "importance.json", {"step": model.index.origin["step"], "parts": measured})
    write_report(folder.path)
    return measured


def _importance(model: Model, config: TrainConfig) -> list[dict[str, Any]]:
    mapping = RowMapping.from_config(model.mapping_config())
    rows, schema = _some_rows(config, mapping), mapping.schema
    baseline, order = _figures(model, mapping, rows), np.random.default_rng(_SEED).permutation(len(rows))
    if baseline["ne"] is None:
        raise TrainError("--importance: all evaluation rows have the same label; name other rows with --data")
    inputs = []
    for name, kind, columns in _inputs(config, schema):
        permuted = rows
        for column in columns:
            index = permuted.column_names.index(column)
            permuted = permuted.set_column(index, permuted.field(index), permuted.column(column).take(pa.array(order)))
        figures = _figures(model, mapping, permuted)
        ne, auc = figures["ne"] - baseline["ne"], baseline["auc"] - figures["auc"]
        inputs.append({"name": name, "kind": kind, "ne": ne, "auc": auc})
    return sorted(inputs, key=lambda item: -item["ne"])


def _some_rows(config: TrainConfig, mapping: RowMapping) -> pa.Table:
    """A sample of up to `ROWS` valid evaluation rows from all files."""
    if config.data.eval is None:
        raise TrainError("--importance: the run has no data.eval; give rows to score with --data")
    manifest = Manifest.of(config.data.eval, config.training_schema)
    random, tables = np.random.default_rng(_SEED), list[pa.Table]()
    for number in random.permutation(len(manifest.windows)):
        table, problems = read_window(manifest, number)
        if problems:
            raise problems.error(int(problems.rows()[0]))
        _, errors = mapping.to_batch_and_errors(table)
        tables.append(table.take(pa.array([row for row in range(len(table)) if row not in errors], pa.int64())))
        if sum(map(len, tables)) >= ROWS:
            break
    rows = pa.concat_tables(tables).combine_chunks()
    return rows.take(pa.array(random.permutation(len(rows))[:ROWS]))


def _inputs(config: TrainConfig, schema: Schema) -> Iterator[tuple[str, str, Sequence[str]]]:
    """(name, kind, columns) of each table and dense feature."""
    columns = {feature.name: schema.sources(feature) for feature in schema.sparse}
    for table in config.tables:
        read = [column for name in table.features for column in columns[name]]
        yield table.name, "table", list(dict.fromkeys(read))
    for feature in schema.dense:
        yield feature.name, "number", schema.sources(feature)


def _figures(model: Model, mapping: RowMapping, rows: pa.Table) -> Mapping[str, Any]:
    batch = mapping.to_batch(rows)
    metrics = LabelMetrics(mapping.schema.label_kinds, torch.device("cpu"), mapping.schema.task_names)
    metrics.update(model.score(batch), batch.label, batch.weight)
    figures: Mapping[str, Any] = metrics.compute()
    return figures
