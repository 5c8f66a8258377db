"""`predict`: scores Parquet files into Parquet files with the columns and a prediction, every row once.

The footers of the files divide the rows into parts. A part's file is written atomically, under a name with the part's
number; a job that was interrupted skips the parts whose file exists.
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
from rayrec.inference.exports import Exports
from rayrec.inference.model import Model
from rayrec.inference.predictions import Output
from rayrec.inference.scorer import Scorer, features_only
from rayrec.storage.cache import Held
from rayrec.storage.parallel import in_tasks, start_ray
from rayrec.storage.parquet import open_parquet
from rayrec.storage.retries import Patience

PLAN, DONE = "_predict.json", "_done.json"
ROWS_PER_FILE = 1 << 18
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True)
class Predicted:
    """Parts and rows that a call scored, without those of earlier calls, and bad rows by reason."""

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
    """Score all rows of Parquet files.

    Every row comes once, with its columns and `prediction` (`prediction_<label>` for each of several labels), the
    probability; rows keep their order inside a file. Call it again after an interruption: it goes on.

    Args:
        model: an exported folder, or a folder of exports, of which the newest scores; a path or URI.
        data: files, folders or globs.
        out: a folder that all workers see, a path or the URI of object storage.
        columns: of the input to keep; default: all.
        workers: Ray tasks at once, each a CPU; 0: this process.
        bad_rows: what happens to a row that cannot be used.
        bad_rows_limit: with "skip": more of them than this end the job.

    Raises:
        ExportError: there is no whole export.
        DataError: files that do not fit the schema; a bad row, with file, row group, row, column and fix.
        ValueError: `out` holds predictions of other data or another model, or cannot be written.
    """
    begin, place = time.perf_counter(), Output(out)
    if workers:
        start_ray()
    export = Exports(model).newest()
    source = export.path if export.remote else str(Path(export.path).absolute())
    scorer, _held = _opened(source)
    manifest = Manifest.read(data, features_only(scorer.schema), window_rows=rows_per_file)
    kept = _columns(manifest, columns, scorer.model.labels)
    task = Task(model=source, out=place.path, columns=kept, bad_rows=bad_rows)
    parts = [slices_of(manifest, number) for number in range(len(manifest.windows))]
    skipped: Counter[str] = Counter()
    rows = done = 0
    with place.locked():
        _same_as_before(place, scorer.model.version, manifest, task, len(parts))
        there = place.parts()
        left = [number for number in range(len(parts)) if number not in there]
        if len(left) < len(parts):
            say(f"{len(parts) - len(left)} of {len(parts)} parts are there already")
        for done_part in _work(task, parts, left, workers, scorer):
            skipped.update(done_part["skipped"])
            rows, done = rows + done_part["rows"], done + 1
            if sum(skipped.values()) > bad_rows_limit:
                raise DataError(
                    f"more than {bad_rows_limit} rows cannot be used: {dict(skipped.most_common(5))}",
                    fix="correct the data, or raise the limit of bad rows",
                )
        seconds = time.perf_counter() - begin
        place.write(DONE, {"rows": manifest.rows, "parts": len(parts), "model": scorer.model.version})
    return Predicted(done, rows, seconds, dict(skipped))


def _columns(manifest: Manifest, wanted: Sequence[str] | None, labels: Sequence[str]) -> Columns:
    """The columns to copy, by the first file's footer, partitions among them."""
    first = manifest.files[0]
    with open_parquet(first.uri, first.version) as parquet:
        kinds = dict(zip(parquet.schema_arrow.names, parquet.schema_arrow.types, strict=True))
    kinds |= {name: pa.string() if isinstance(value, str) else pa.int64() for name, value in first.partition}
    kinds |= dict(manifest.columns)
    for name in wanted or []:
        if name not in kinds:
            raise DataError(f"there is no column {name!r} to keep; there are {', '.join(kinds)}", file=first.uri)
    names = list(kinds) if wanted is None else list(wanted)
    for name in prediction_columns(labels).values():
        if name in names:
            raise DataError(
                f"the data has a column {name!r} already", file=first.uri, fix="keep other columns only (--columns)"
            )
    return tuple((name, kinds[name]) for name in names)


def _work(
    task: Task, parts: Sequence[tuple[FileSlice, ...]], left: Sequence[int], workers: int, scorer: Scorer
) -> Iterator[dict[str, Any]]:
    """Scores the parts that are left; yields the number of rows of each, and its bad rows by reason."""
    if workers == 0 or not left:
        yield from (predict_part(task, scorer, number, parts[number]) for number in left)
        return
    yield from in_tasks(partial(predict_in_worker, task), ((n, parts[n]) for n in left), cpus=1.0, at_once=workers)


def _same_as_before(out: Output, version: str, manifest: Manifest, task: Task, parts: int) -> None:
    plan = {
        "model": version,
        "data": manifest.fingerprint,
        "parts": parts,
        "columns": [name for name, _ in task.columns],
    }
    before = out.read(PLAN)
    if before is None:
        out.write(PLAN, plan)
        return
    differing = [key for key, value in plan.items() if before.get(key) != value]
    if differing:
        other = f"other {', '.join(differing)}"
        raise ValueError(f"{out.path} holds predictions of another job ({other}); take another folder")


Policy = Literal["error", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The settings of a prediction job that every worker needs.

    Args:
        model: path or URI of the export.
        out: path or URI of the predictions' folder.
        columns: of the input to keep, with their types.
        bad_rows: "error" ends the job at the first bad row; "skip" gives bad rows the prediction null and counts them.
    """

    model: str
    out: str
    columns: Columns
    bad_rows: Policy


def predict_part(task: Task, scorer: Scorer, number: int, slices: tuple[FileSlice, ...]) -> dict[str, Any]:
    """Reads, scores and writes one part.

    Raises:
        DataError: it cannot be read, or, with the policy "error", the first bad row.
    """
    kept = [name for name, _ in task.columns]
    scored = features_only(scorer.schema).columns
    kinds = dict(task.columns)
    read = task.columns + tuple((name, _type_of(slices, name)) for name in scored if name not in kinds)
    table, missing = read_slices(slices, read, Patience())
    if missing:
        raise missing[0].error
    scores = scorer.score(table.select(scored))
    origin = Origin(slices, None)
    if scores.errors and task.bad_rows == "error":
        row = min(scores.errors)
        file, row_group, file_row = origin.locate(row)
        place = {"file": file, "row_group": row_group, "row": file_row}
        raise DataError(**{**scores.errors[row].to_dict(), **place})
    result = table.select(kept)
    for label, column in prediction_columns(scorer.model.labels).items():
        result = result.append_column(column, pa.array(scores.probabilities[label], from_pandas=True))
    Output(task.out).write_part(number, result)
    return {"rows": table.num_rows, "skipped": dict(Counter(error.problem for error in scores.errors.values()))}


def predict_in_worker(task: Task, part: tuple[int, tuple[FileSlice, ...]]) -> dict[str, Any]:
    """As `predict_part`, in a process that keeps the model for its next part."""
    torch.set_num_threads(1)
    return predict_part(task, _kept(task.model)[0], *part)


def _opened(model: str) -> tuple[Scorer, Held]:
    """Of an export at a path or URI; it scores as long as its folder is held."""
    exports = Exports(model)
    held = exports.open(exports.newest())
    return Scorer(Model(held.folder, checksums=False)), held


_kept = lru_cache(maxsize=1)(_opened)


def prediction_columns(labels: Sequence[str]) -> dict[str, str]:
    """Label → the column of its predictions."""
    return {label: "prediction" if len(labels) == 1 else f"prediction_{label}" for label in labels}


def _type_of(slices: Sequence[FileSlice], name: str) -> pa.DataType:
    partition = dict(slices[0].file.partition)
    if name in partition:
        return pa.string() if isinstance(partition[name], str) else pa.int64()
    with open_parquet(slices[0].uri, slices[0].file.version) as parquet:
        found = parquet.schema_arrow
        return found.field(name).type if name in found.names else pa.null()  # which the schema takes
