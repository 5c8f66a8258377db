"""Exports a checkpoint of a run with `rayrec.inference.export`."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rayrec.checkpoint import Checkpoint, CheckpointStore, DamagedCheckpointError
from rayrec.checkpoint.manifest import read_checkpoint
from rayrec.checkpoint.weights import CheckpointWeights
from rayrec.data import BatchStream, Manifest
from rayrec.data.formats.text_options import reading_text
from rayrec.data.source.windows import Windows
from rayrec.dynamic_ids import TableMaps
from rayrec.inference.export import Export, ExportOptions, Trained, export
from rayrec.inference.graph import Inputs, QueryOutput
from rayrec.inference.parity import METRICS
from rayrec.models import Batch, Retriever
from rayrec.models.retriever import QueryInputs
from rayrec.storage.folder import open_folder
from rayrec.train.config.file import parse_config
from rayrec.train.config.train_config import TrainConfig
from rayrec.train.errors import StorageError, TrainError
from rayrec.train.report import write_report
from rayrec.train.run.choice import NEWEST, Tell, choose, refused
from rayrec.train.run.config import config_of_run
from rayrec.train.run.folder import RunFolder
from rayrec.train.setup import build
from rayrec.train.setup.dynamic_ids import found, maps_of
from rayrec.train.terminal import notice
from rayrec.train.worker.evaluator import EVAL_ROWS

_DRAWN = 64  # number of row groups (or series of small ones) in a sample of evaluation rows


def export_run(
    source: str | Path,
    out: str | Path,
    wanted: ExportOptions | None = None,
    data: str | None = None,
    factory: build.Factory | None = None,
    allow_code: bool = False,
    checkpoint: str = NEWEST,
) -> Export:
    """Export a checkpoint of a run; any sharding plan and world size.

    A damaged checkpoint is an error; `checkpoint="whole"` skips damaged ones and reports them on stderr.

    Args:
        source: a run folder, or a checkpoint inside it.
        data: rows to compare scores on; default: the run's `data.eval`.
        factory: makes the model, if the run was given one in Python.
        allow_code: import a `model.factory` that the run folder names.
        checkpoint: see `choose`; only for a run folder.

    Raises:
        ValueError: not a run, no checkpoint, no evaluation rows, or an error of `rayrec.inference.export`.
    """
    folder, selected = find_checkpoint(Path(source).absolute(), checkpoint)
    return _export(folder, selected, out, wanted, data=data, factory=factory, allow_code=allow_code)


def _export(
    folder: RunFolder, checkpoint: Checkpoint, out: str | Path, options: ExportOptions | None, **source: Any
) -> Export:
    """Export, and record the export in the run. `source` has further arguments of `trained_of`."""
    report = write_export(trained_of(folder, checkpoint, **source), out, options)
    note_export(folder, report)
    return report


def write_export(trained: Trained, out: str | Path, options: ExportOptions | None) -> Export:
    """`rayrec.inference.export`, with the fix for a damaged checkpoint.

    Raises:
        ValueError: see `export_run`.
    """
    try:
        return export(trained, out, options)
    except DamagedCheckpointError as error:
        raise refused(error) from error


def exported_run(run: str | Path, allow_code: bool = False, checkpoint: str = NEWEST, tell: Tell | None = None) -> Path:
    """The fp32 export of a checkpoint in the run's `exports/`; created if missing.

    Args:
        checkpoint: see `choose`.
        tell: called with a message that names the checkpoint.

    Raises:
        ValueError: see `export_run`.
    """
    folder, selected = find_checkpoint(Path(run).absolute(), checkpoint)
    if tell is not None:
        tell(f"read the checkpoint of step {selected.step}: {selected.path}")
    out = folder.path / "exports" / open_folder(selected.path).name
    if not out.exists():
        _export(folder, selected, out, None, allow_code=allow_code)
    return out


def note_export(folder: RunFolder, report: Export) -> None:
    """Record the export in `exports.jsonl` of the run, and rewrite the report, unless the run folder is read-only."""
    with suppress(OSError, StorageError):
        _note(folder, report)


def _note(folder: RunFolder, report: Export) -> None:
    index, parity = report.index, report.parity
    formats = sorted({table.format.value for table in index.places}, reverse=True)
    line = {
        "time": time.time(),
        "path": str(report.folder.absolute()),
        "version": index.version,
        "step": index.origin.get("step"),
        "tables": ", ".join(formats),
        "dense": index.dense,
        "target": index.targets[-1],
        "share": parity.bytes["tables"] / parity.bytes["fp32"],
        "trained": parity.trained,
        "exported": parity.exported,
        "within_limits": not parity.problems,
        "rows": parity.rows,
        "sampled": parity.sampled,
    }
    with open(folder.exports, "a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    write_report(folder.path)


def find_checkpoint(source: Path, which: str = NEWEST) -> tuple[RunFolder, Checkpoint]:
    """The run and the checkpoint at a path; in a run folder, `which` selects the checkpoint (see `choose`).

    Raises:
        TrainError: the path is neither a run nor a committed checkpoint.
        CheckpointError: the checkpoint is damaged, or all are.
    """
    for folder in (RunFolder(source), RunFolder(source.parent.parent)):
        if not folder.config.exists():
            continue
        if folder.path == source:
            return folder, choose(folder, which, notice)
        if which != NEWEST:
            raise TrainError(f"--checkpoint {which}: {source} is a checkpoint; give the run folder {folder.path}")
        committed = read_checkpoint(CheckpointStore(folder.checkpoints).root.sub(source.name))
        if committed is None:
            raise TrainError(
                f"{source} has no complete checkpoint: train it first, or name one of {folder.checkpoints}"
            )
        return folder, committed
    raise TrainError(f"{source} is neither a run folder (it has no config.yaml) nor a checkpoint of one")


def parsed_config(
    folder: RunFolder, data: str | None = None, factory: build.Factory | None = None, allow_code: bool = False
) -> TrainConfig:
    """The config of a run. Arguments and errors as for `trained_of`."""
    return parse_config(config_of_run(folder, allow_code=allow_code or factory is not None, data=data))


def trained_of(
    folder: RunFolder,
    checkpoint: Checkpoint,
    data: str | None = None,
    factory: build.Factory | None = None,
    allow_code: bool = False,
) -> Trained:
    """The input of `rayrec.inference.export` for a checkpoint of a run; of a retriever, for its queries.

    Raises:
        TrainError: the run has no evaluation rows.
    """
    config = parsed_config(folder, data, factory, allow_code)
    if config.data.eval is None:
        raise TrainError(f"the config of {folder.path} has no data.eval; give rows to compare scores on with --data")
    schema = config.data_schema
    with reading_text(config.data.read.text):
        manifest = Manifest.of(config.data.eval, config.row_schema)
    labels, weights = schema.task_names, CheckpointWeights(checkpoint.path)
    maps = maps_of(config, weights) if schema.dynamic else None
    trained = Trained(
        make_model=lambda: build.model(config, "cpu", factory),
        weights=weights,
        inputs=Inputs(
            keys=tuple(config.row_schema.sparse_names),
            num_dense=config.row_schema.num_dense,
            labels=None if labels is None else tuple(labels),
            weighted=schema.weighted,
            kinds=tuple(schema.label_kinds) if "number" in schema.label_kinds else None,
        ),
        mapping={key: config.to_dict()[key] for key in ("schema", "tables")},
        rows_of=build.rows_of(config),
        batches=partial(_batches, config, manifest, maps),
        recorded=None if data is not None else _recorded(folder, checkpoint.step),
        logit_shift=math.log(config.data.negative_rate),
        ids={} if maps is None else maps.by_feature(),
        origin={
            "run": config.name,
            "checkpoint": open_folder(checkpoint.path).name,
            "step": checkpoint.step,
            "time": checkpoint.manifest.time,
        },
    )
    model = trained.make_model()
    return _for_queries(trained, model.reads) if isinstance(model, Retriever) else trained


def _for_queries(trained: Trained, reads: QueryInputs) -> Trained:
    """Restricts the inputs of a retriever to those of its query."""
    raw: dict[str, Any] = trained.mapping["schema"]
    sequences = [
        {
            **sequence,
            "ids": [name for name in sequence["ids"] if name in reads.features],
            "values": [value for value in sequence["values"] if f"{sequence['name']}.{value['name']}" in reads.lists],
        }
        for sequence in raw["sequences"]
        if set(sequence["ids"]) & set(reads.features)
    ]
    sparse = [feature for feature in raw["sparse"] if feature["name"] in reads.features]
    widths = [feature.get("width", 1) for feature in raw["dense"]]
    read = range(sum(widths)) if reads.dense_columns is None else reads.dense_columns
    columns = [*read] if reads.dense else []
    firsts = [sum(widths[:number]) for number in range(len(widths))]
    dense = [feature for feature, first in zip(raw["dense"], firsts, strict=True) if first in columns]
    schema = {**raw, "sparse": sparse, "sequences": sequences, "dense": dense}
    keys = tuple(key for key in trained.inputs.keys if key in reads.features)

    def batches(rows: int | None = None) -> Iterator[Batch]:
        for batch in trained.batches(rows):
            yield replace(batch, dense=batch.dense[:, columns])

    return replace(
        trained,
        inputs=Inputs(
            keys=keys,
            num_dense=len(columns),
            labels=None,
            weighted=trained.inputs.weighted and any(feature["kind"] == "weighted_id_list" for feature in sparse),
            query=QueryOutput(seen=reads.seen),
            lists=reads.lists,
        ),
        mapping={**trained.mapping, "schema": schema},
        rows_of={key: trained.rows_of[key] for key in keys},
        batches=batches,
        recorded=None,
        logit_shift=0.0,
    )


def _batches(
    config: TrainConfig, manifest: Manifest, maps: TableMaps | None, rows: int | None = None
) -> Iterator[Batch]:
    """The evaluation rows, read as by the trainer's evaluation in one process.

    Args:
        maps: gives dynamic ids their rows.
        rows: approximate size of a sample: the first rows of row groups that the run's seed selects; default: all
            rows.
    """
    sampled = rows is not None and manifest.rows > rows
    if rows is not None and sampled:
        windows = Windows.of(manifest.files, max(1, rows // _DRAWN), manifest.limits[1])
        manifest = replace(manifest, windows=windows)
    stream = BatchStream(
        manifest,
        config.row_schema,
        build.rows_of(config),
        batch_rows=config.trainer.batch_size,
        rank=0,
        world_size=1,
        cursor=EVAL_ROWS,
        seed=config.trainer.seed,
        shuffle=sampled,
        interleave=4 * _DRAWN,  # a quarter of these windows comes first
        options=config.data.read.model_copy(update={"reader": "local"}),
    )
    with stream:
        for batch, _ in stream:
            yield batch if maps is None else found(batch, maps)


def _recorded(folder: RunFolder, step: int) -> dict[str, Any] | None:
    """Metrics of the run's evaluation at this step; None without one."""
    of_step = [line for line in folder.read_metrics() if line.get("kind") == "eval" and line.get("step") == step]
    names = ("tasks", "samples", *METRICS)
    return {key: of_step[-1][key] for key in names if key in of_step[-1]} if of_step else None
