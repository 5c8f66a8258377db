"""`predict`: scores Parquet files; the output files have the input columns and a prediction.

The rows are divided into parts by the files' footers. The output file of a part is written atomically and has the
part's number in its name, so that an interrupted job skips the parts that exist.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch

from rayrec.data import DataError, Manifest
from rayrec.data.source.slices import Columns, FileSlice, Origin, read_slices, slices_of
from rayrec.inference.export_store import ExportStore
from rayrec.inference.model import Model
from rayrec.inference.prediction_files import PredictionFiles
from rayrec.inference.scorer import Scorer, features_only
from rayrec.storage.cache import Held
from rayrec.storage.parallel import in_tasks, start_ray
from rayrec.storage.parquet import open_parquet
from rayrec.storage.retries import Patience
from rayrec.storage.struct_fields import leaf_columns

PLAN, DONE = "_predict.json", "_done.json"
ROWS_PER_FILE = 1 << 18
Say = Callable[[str], object]


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
    begin, output = time.perf_counter(), PredictionFiles(out)
    if workers:
        start_ray()
    export = ExportStore(model).newest()
    source = export.path if export.remote else str(Path(export.path).absolute())
    scorer, _in_use = _open(source)  # the second keeps a copy in the cache
    manifest = Manifest.read(data, features_only(scorer.schema), window_rows=rows_per_file)
    output_columns = _columns(manifest, columns, scorer.model.labels)
    task = Task(model=source, out=output.path, columns=output_columns, bad_rows=bad_rows)
    part_slices = [slices_of(manifest, number) for number in range(len(manifest.windows))]
    skipped: Counter[str] = Counter()
    num_rows = num_parts = 0
    with output.locked():
        _check_plan(output, scorer.model.version, manifest, task, len(part_slices))
        existing = output.parts()
        remaining = [number for number in range(len(part_slices)) if number not in existing]
        if len(remaining) < len(part_slices):
            say(f"{len(part_slices) - len(remaining)} of {len(part_slices)} parts exist already")
        for result in _score_parts(task, part_slices, remaining, workers, scorer):
            skipped.update(result["skipped"])
            num_rows, num_parts = num_rows + result["rows"], num_parts + 1
            if sum(skipped.values()) > bad_rows_limit:
                raise DataError(
                    f"more than {bad_rows_limit} rows cannot be mapped: {dict(skipped.most_common(5))}",
                    fix="correct the data, or raise the limit of bad rows",
                )
        seconds = time.perf_counter() - begin
        output.write(DONE, {"rows": manifest.rows, "parts": len(part_slices), "model": scorer.model.version})
    return Predicted(num_parts, num_rows, seconds, dict(skipped))


def _columns(manifest: Manifest, names: Sequence[str] | None, labels: Sequence[str]) -> Columns:
    """The columns to copy with their types, partitions included, by the first file's footer."""
    file = manifest.files[0]
    with open_parquet(file.uri, file.version) as parquet:
        arrow = parquet.schema_arrow
    fields = {field.name: field.type for field in leaf_columns(arrow) if field.name not in arrow.names}
    types = fields | dict(zip(arrow.names, arrow.types, strict=True))
    types |= {name: pa.string() if isinstance(value, str) else pa.int64() for name, value in file.partition}
    types |= dict(manifest.columns)
    for name in names or []:
        if name not in types:
            raise DataError(f"unknown column {name!r} to keep; the data has {', '.join(types)}", file=file.uri)
    names = [name for name in types if name not in fields] if names is None else list(names)
    for name in prediction_columns(labels).values():
        if name in names:
            raise DataError(
                f"the data already has a column {name!r}", file=file.uri, fix="keep other columns only (--columns)"
            )
    return tuple((name, types[name]) for name in names)


def _score_parts(
    task: Task, part_slices: Sequence[tuple[FileSlice, ...]], numbers: Sequence[int], workers: int, scorer: Scorer
) -> Iterator[dict[str, Any]]:
    """Scores these parts; yields the number of rows of each, and its bad rows by reason."""
    if workers == 0 or not numbers:
        yield from (predict_part(task, scorer, number, part_slices[number]) for number in numbers)
        return
    arguments = ((number, part_slices[number]) for number in numbers)
    yield from in_tasks(partial(predict_in_worker, task), arguments, cpus=1.0, at_once=workers)


def _check_plan(output: PredictionFiles, version: str, manifest: Manifest, task: Task, parts: int) -> None:
    plan = {
        "model": version,
        "data": manifest.fingerprint,
        "parts": parts,
        "columns": [name for name, _ in task.columns],
    }
    previous = output.read(PLAN)
    if previous is None:
        output.write(PLAN, plan)
        return
    differing = [key for key, value in plan.items() if previous.get(key) != value]
    if differing:
        text = f"{output.path} has predictions of another job (different {', '.join(differing)})"
        raise ValueError(f"{text}; choose another folder")


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


def predict_part(task: Task, scorer: Scorer, number: int, slices: tuple[FileSlice, ...]) -> dict[str, Any]:
    """Reads, scores and writes a part.

    Raises:
        DataError: The part cannot be read; or, with the policy "error", the first bad row.
    """
    types = dict(task.columns)
    features = features_only(scorer.schema).columns
    columns = task.columns + tuple((name, _type_of(slices, name)) for name in features if name not in types)
    table, missing = read_slices(slices, columns, Patience())
    if missing:
        raise missing[0].error
    scores = scorer.score(table.select(features))
    origin = Origin(slices, None)
    if scores.errors and task.bad_rows == "error":
        row = min(scores.errors)
        file, row_group, file_row = origin.locate(row)
        location = {"file": file, "row_group": row_group, "row": file_row}
        raise DataError(**{**scores.errors[row].to_dict(), **location})
    result = table.select(list(types))
    for label, column in prediction_columns(scorer.model.labels).items():
        result = result.append_column(column, pa.array(scores.probabilities[label], from_pandas=True))
    PredictionFiles(task.out).write_part(number, result)
    return {"rows": table.num_rows, "skipped": dict(Counter(error.problem for error in scores.errors.values()))}


def predict_in_worker(task: Task, part: tuple[int, tuple[FileSlice, ...]]) -> dict[str, Any]:
    """`predict_part` in a process that keeps the model loaded for its next part."""
    torch.set_num_threads(1)
    return predict_part(task, _open_once(task.model)[0], *part)


def _open(model: str) -> tuple[Scorer, Held]:
    """Loads the export at a path or URI. `Held` must be kept while it scores: it keeps the copy in the cache."""
    store = ExportStore(model)
    export = store.open(store.newest())
    return Scorer(Model(export.folder, checksums=False)), export


_open_once = lru_cache(maxsize=1)(_open)


def prediction_columns(labels: Sequence[str]) -> dict[str, str]:
    """label → column of its predictions."""
    return {label: "prediction" if len(labels) == 1 else f"prediction_{label}" for label in labels}


def _type_of(slices: Sequence[FileSlice], name: str) -> pa.DataType:
    partition = dict(slices[0].file.partition)
    if name in partition:
        return pa.string() if isinstance(partition[name], str) else pa.int64()
    with open_parquet(slices[0].uri, slices[0].file.version) as parquet:
        schema = leaf_columns(parquet.schema_arrow)
        return schema.field(name).type if name in schema.names else pa.null()  # a column of nulls fits any type
