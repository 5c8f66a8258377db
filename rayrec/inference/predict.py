"""`predict`: Parquet to Parquet with predictions beside the columns, every row once, however often it is interrupted.

The rows are cut into parts once, by the footers; a part's file appears whole or not at all, under a name that says
which part it is. What is there already is not done again.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq

from rayrec.data import DataError, Manifest
from rayrec.data.source.slices import Columns, FileSlice, Origin, read_slices, slices_of
from rayrec.data.storage.opening import open_parquet
from rayrec.data.storage.retries import Patience
from rayrec.inference.model import Model
from rayrec.inference.scorer import Scorer, features_only

PLAN, DONE = "_predict.json", "_done.json"
ROWS_PER_FILE = 1 << 18
Policy = Literal["error", "skip"]
Say = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What every worker needs to know.

    Args:
        model: folder of the export.
        out: folder of the predictions.
        columns: of the input that are kept, with their types; those that are scored are read besides.
        bad_rows: "error" ends the job with the first, "skip" gives them null as prediction and counts them.
    """

    model: Path
    out: Path
    columns: Columns
    bad_rows: Policy
    retries: int = 3


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a call did: parts and rows that it scored (those done before are left out), and bad rows by reason."""

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
        model: an exported folder.
        data: files, folders or globs.
        out: a folder that all workers see.
        columns: of the input to keep; default: all.
        workers: actors of Ray Data, each a CPU; 0: this process.
        bad_rows: what happens to a row that cannot be used.
        bad_rows_limit: with "skip": more of them than this end the job.

    Raises:
        DataError: files that do not fit the schema; a bad row, with file, row group, row, column and fix.
        ValueError: `out` holds predictions of other data or another model.
    """
    begin, out = time.perf_counter(), Path(out)
    scorer = Scorer(Model(model))
    manifest = Manifest.read(data, features_only(scorer.schema), window_rows=rows_per_file)
    task = Task(
        model=Path(model).absolute(),
        out=out.absolute(),
        columns=_kept(manifest, columns, scorer.model.labels),
        bad_rows=bad_rows,
    )
    parts = [slices_of(manifest, window) for window in manifest.windows]
    out.mkdir(parents=True, exist_ok=True)
    skipped: Counter[str] = Counter()
    rows = done = 0
    with _locked(out):
        _same_as_before(out, scorer.model.version, manifest, task, len(parts))
        left = [number for number in range(len(parts)) if not _file(out, number).exists()]
        if len(left) < len(parts):
            say(f"{len(parts) - len(left)} of {len(parts)} parts are there already")
        for told in _work(task, parts, left, workers, scorer):
            skipped.update(told["skipped"])
            rows, done = rows + told["rows"], done + 1
            if sum(skipped.values()) > bad_rows_limit:
                raise DataError(
                    f"more than {bad_rows_limit} rows cannot be used: {dict(skipped.most_common(5))}",
                    fix="correct the data, or raise the limit of bad rows",
                )
        seconds = time.perf_counter() - begin
        _write(out / DONE, {"rows": manifest.rows, "parts": len(parts), "model": scorer.model.version})
    return Predicted(done, rows, seconds, dict(skipped))


def prediction_columns(labels: Sequence[str]) -> dict[str, str]:
    """Label → the column of its predictions."""
    return {label: "prediction" if len(labels) == 1 else f"prediction_{label}" for label in labels}


def _kept(manifest: Manifest, wanted: Sequence[str] | None, labels: Sequence[str]) -> Columns:
    """The columns to copy, by the first file's footer, partitions among them."""
    first = manifest.files[0]
    with open_parquet(first.uri, first.size_bytes) as parquet:
        kinds = dict(zip(parquet.schema_arrow.names, parquet.schema_arrow.types, strict=True))
    kinds |= {name: pa.string() if isinstance(value, str) else pa.int64() for name, value in first.partition}
    kinds |= {name: kind for name, kind in manifest.columns if name in kinds}
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
    """Does the parts that are left, and tells of each: its rows, and the bad ones among them."""
    if workers == 0 or not left:
        yield from (predict_part(task, scorer, number, parts[number]) for number in left)
        return
    from rayrec.inference.on_ray import predict_on_ray  # Ray Data takes a second to import

    yield from predict_on_ray(task, parts, left, workers)


def predict_part(task: Task, scorer: Scorer, number: int, slices: tuple[FileSlice, ...]) -> dict[str, Any]:
    """Reads, scores and writes one part.

    Raises:
        DataError: it cannot be read, or, with the policy "error", the first bad row.
    """
    kept = [name for name, _ in task.columns]
    scored = features_only(scorer.schema).columns
    kinds = dict(task.columns)
    read = task.columns + tuple((name, _type_of(slices, name)) for name in scored if name not in kinds)
    table, missing = read_slices(slices, read, Patience(task.retries))
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
    path = _file(task.out, number)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    pq.write_table(result, temporary)
    os.replace(temporary, path)
    return {"rows": table.num_rows, "skipped": dict(Counter(error.problem for error in scores.errors.values()))}


def _type_of(slices: Sequence[FileSlice], name: str) -> pa.DataType:
    partition = dict(slices[0].partition)
    if name in partition:
        return pa.string() if isinstance(partition[name], str) else pa.int64()
    with open_parquet(slices[0].uri, slices[0].size_bytes) as parquet:
        return parquet.schema_arrow.field(name).type


def _file(out: Path, number: int) -> Path:
    return out / f"part-{number:06d}.parquet"


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    """One job a folder. What an interrupted one left half written is removed."""
    with open(out / "_lock", "a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ValueError(f"another job is writing predictions into {out}; wait for it") from None
        except OSError:
            pass  # a file system without locks
        for path in out.glob(".part-*"):
            path.unlink(missing_ok=True)
        yield


def _same_as_before(out: Path, version: str, manifest: Manifest, task: Task, parts: int) -> None:
    plan = {
        "model": version,
        "data": manifest.fingerprint,
        "parts": parts,
        "columns": [name for name, _ in task.columns],
    }
    path = out / PLAN
    if path.exists():
        before = json.loads(path.read_text(encoding="utf-8"))
        differing = [key for key, value in plan.items() if before.get(key) != value]
        if differing:
            raise ValueError(
                f"{out} holds predictions of another job (other {', '.join(differing)}); take another folder"
            )
        return
    _write(path, plan)


def _write(path: Path, value: Mapping[str, Any]) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(value) + "\n", encoding="utf-8")
    os.replace(temporary, path)


def parts_in(out: Path) -> Iterable[Path]:
    """The files of predictions, in the order of the rows."""
    return sorted(out.glob("part-*.parquet"))
