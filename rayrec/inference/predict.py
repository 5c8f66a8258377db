"""`predict`: scores Parquet files; the output files have the input columns and a prediction."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch

from rayrec.data import DataError, Manifest
from rayrec.data.source.slices import Columns, Origin
from rayrec.inference.export_store import ExportStore
from rayrec.inference.file_jobs import ROWS_PER_FILE, FileJob, Part, Say, kept_columns, read_part
from rayrec.inference.model import Model
from rayrec.inference.part_files import PartFiles
from rayrec.inference.scorer import Scorer, features_only
from rayrec.storage.cache import Held
from rayrec.storage.parallel import start_ray

RECORD = "_predict.json"


@dataclass(frozen=True, slots=True)
class Predicted:
    """Parts and rows that this call scored, and skipped rows by reason."""

    parts: int
    rows: int
    seconds: float
    skipped: dict[str, int]


def predict(
    model: str | Path,
    data: str | Sequence[str],
    out: str | Path,
    *,
    columns: Sequence[str] | None = None,
    workers: int = 0,
    bad_rows: Policy = "error",
    bad_rows_limit: int = 1000,
    rows_per_file: int = ROWS_PER_FILE,
    say: Say = print,
) -> Predicted:
    """Scores all rows of Parquet files.

    The output has every row once, with its columns and `prediction` (`prediction_<label>` for each of several labels),
    the probability or predicted number. Rows keep their order within a file. After an interruption, call it again to
    resume.

    Args:
        model: An export, or a folder of exports, of which the newest scores; a path or URI.
        data: Files, folders or globs.
        out: Folder that all workers can access; a path or URI.
        columns: Input columns to keep; default: all.
        workers: Concurrent Ray tasks, with a CPU each; 0: this process.
        bad_rows: "error" fails at the first row that cannot be mapped; "skip" gives it a null prediction.
        bad_rows_limit: With "skip", the number of bad rows above which the job fails.
        rows_per_file: Approximate number of rows of an output file.

    Raises:
        ExportError: The export is missing or incomplete.
        DataError: A file does not fit the schema, or a bad row, with file, row group, row, column and fix.
        ValueError: `out` has predictions of other data or another model, or cannot be written.
    """
    begin, output = time.perf_counter(), PartFiles(out)
    if workers:
        start_ray()
    export = ExportStore(model).newest()
    source = export.path if export.remote else str(Path(export.path).absolute())
    scorer, _in_use = _open(source)  # the second keeps a copy in the cache
    manifest = Manifest.read(data, features_only(scorer.schema), window_rows=rows_per_file)
    labels = scorer.model.labels
    kept = kept_columns(manifest, columns, [*prediction_columns(labels).values()])
    task = Task(model=source, out=output.path, columns=kept, bad_rows=bad_rows)
    job = FileJob(
        output=output,
        manifest=manifest,
        record_file=RECORD,
        made_of={"model": scorer.model.version, "columns": [name for name, _ in kept]},
        here=partial(predict_part, task, scorer),
        in_worker=partial(predict_in_worker, task),
    )
    skipped: Counter[str] = Counter()
    num_rows = num_parts = 0
    for result in job.run(workers, say):
        skipped.update(result["skipped"])
        num_rows, num_parts = num_rows + result["rows"], num_parts + 1
        if sum(skipped.values()) > bad_rows_limit:
            raise DataError(
                f"more than {bad_rows_limit} rows cannot be mapped: {dict(skipped.most_common(5))}",
                fix="correct the data, or raise the limit of bad rows",
            )
    return Predicted(num_parts, num_rows, time.perf_counter() - begin, dict(skipped))


Policy = Literal["error", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The settings of a prediction job that every worker needs.

    Args:
        model: Path or URI of the export.
        out: Path or URI of the output folder.
        columns: Input columns to keep, with their types.
        bad_rows: As in `predict`.
    """

    model: str
    out: str
    columns: Columns
    bad_rows: Policy


def predict_part(task: Task, scorer: Scorer, part: Part) -> dict[str, Any]:
    """Reads, scores and writes a part.

    Raises:
        DataError: The part cannot be read; or, with the policy "error", the first bad row.
    """
    (number, slices), features = part, features_only(scorer.schema).columns
    table = read_part(slices, task.columns, features)
    scores = scorer.score(table.select(features))
    origin = Origin(slices, None)
    if scores.errors and task.bad_rows == "error":
        row = min(scores.errors)
        file, row_group, file_row = origin.locate(row)
        location = {"file": file, "row_group": row_group, "row": file_row}
        raise DataError(**{**scores.errors[row].to_dict(), **location})
    result = table.select([name for name, _ in task.columns])
    for label, column in prediction_columns(scorer.model.labels).items():
        result = result.append_column(column, pa.array(scores.probabilities[label], from_pandas=True))
    PartFiles(task.out).write_part(number, result)
    return {"rows": table.num_rows, "skipped": dict(Counter(error.problem for error in scores.errors.values()))}


def predict_in_worker(task: Task, part: Part) -> dict[str, Any]:
    """`predict_part` in a process that keeps the model loaded for its next part."""
    torch.set_num_threads(1)
    return predict_part(task, _open_once(task.model)[0], part)


def _open(model: str) -> tuple[Scorer, Held]:
    """Loads the export at a path or URI. `Held` must be kept while it scores: it keeps the copy in the cache."""
    store = ExportStore(model)
    export = store.open(store.newest())
    return Scorer(Model(export.folder, checksums=False)), export


_open_once = lru_cache(maxsize=1)(_open)


def prediction_columns(labels: Sequence[str]) -> dict[str, str]:
    """label → column of its predictions."""
    return {label: "prediction" if len(labels) == 1 else f"prediction_{label}" for label in labels}
