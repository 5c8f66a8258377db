"""What a row is trained towards: its labels, and how much the row counts."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from rayrec.data.problems import Problems
from rayrec.data.schema import SampleWeight, Schema, Task

F32 = npt.NDArray[np.float32]


def map_weight(columns: Mapping[str, pa.Array], weight: SampleWeight, problems: Problems) -> F32:
    """The rows' weights; null, negative and infinite ones are noted in `problems`."""
    array = columns[weight.column]
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    numbers = pc.cast(array, pa.float64(), safe=False).fill_null(np.nan).to_numpy(zero_copy_only=False)
    with np.errstate(over="ignore"):
        values = numbers.astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(values) & (values >= 0)))
    if len(bad):
        problems.add(
            bad,
            weight.column,
            lambda _: "the sample weight must be a finite number of at least 0",
            lambda k: str(array[int(bad[k])].as_py()),
            "remove the row or correct its weight; 0 leaves a row out of loss and figures",
        )
        values[bad] = 0
    return values


def map_labels(columns: Mapping[str, pa.Array], schema: Schema, problems: Problems) -> F32:
    """[n] for one label, [n, T] for several, NaN where one was not observed; bad ones are noted in `problems`."""
    labels = [_label(columns[task.column], task, problems) for task in schema.tasks]
    return labels[0] if schema.label is not None else np.stack(labels, axis=1)


def _label(array: pa.Array, task: Task, problems: Problems) -> F32:
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    nulls = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False)) if array.null_count else None
    if nulls is not None:
        if task.on_null == "error":
            problems.add(
                nulls,
                task.column,
                lambda _: "the label is null",
                lambda _: None,
                "remove the row or fill the label with 0 or 1; one of several labels may also have `on_null: ignore`",
            )
        array = array.fill_null(False if pa.types.is_boolean(array.type) else 0)
    values = array.to_numpy(zero_copy_only=False)
    bad = np.flatnonzero((values != 0) & (values != 1))
    if len(bad):
        problems.add(
            bad,
            task.column,
            lambda _: "the label must be 0 or 1",
            lambda k: str(values[bad[k]]),
            "write labels as 0 and 1 (a threshold on a rating, say)",
        )
    labels = values.astype(np.float32)
    if nulls is not None and task.on_null == "ignore":
        labels[nulls] = np.nan
    return labels
