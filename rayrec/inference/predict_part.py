"""`predict_part`: reads, scores and writes one part of a prediction job, in this process or on a worker of Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import torch

from rayrec.data import DataError
from rayrec.data.source.slices import Columns, FileSlice, Origin, read_slices
from rayrec.inference.model import Model
from rayrec.inference.predictions import Output
from rayrec.inference.scorer import Scorer, features_only
from rayrec.storage.parquet import open_parquet
from rayrec.storage.retries import Patience

Policy = Literal["error", "skip"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The settings of a prediction job that every worker needs.

    Args:
        model: folder of the export.
        out: path or URI of the predictions' folder.
        columns: of the input to keep, with their types.
        bad_rows: "error" ends the job at the first bad row; "skip" gives bad rows the prediction null and counts them.
        retries: of a failed read.
    """

    model: Path
    out: str
    columns: Columns
    bad_rows: Policy
    retries: int = 3


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
    Output(task.out).write_part(number, result)
    return {"rows": table.num_rows, "skipped": dict(Counter(error.problem for error in scores.errors.values()))}


def predict_in_worker(task: Task, part: tuple[int, tuple[FileSlice, ...]]) -> dict[str, Any]:
    """As `predict_part`, in a process that keeps the model for its next part."""
    return predict_part(task, _kept_scorer(task.model), *part)


@lru_cache(maxsize=1)
def _kept_scorer(model: Path) -> Scorer:
    torch.set_num_threads(1)
    return Scorer(Model(model, checksums=False))


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
