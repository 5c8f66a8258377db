"""Prediction on Ray Data: actors that load the model once and score parts."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import ray
import ray.data
import torch

from rayrec.data import DataError
from rayrec.data.source.slices import FileSlice
from rayrec.inference.model import Model
from rayrec.inference.predict_part import Task, predict_part
from rayrec.inference.scorer import Scorer


class _Worker:
    """Scores parts: from a row with a part's number to a row with what `predict_part` returns, or with its error."""

    def __init__(self, task: Task, parts: Sequence[tuple[FileSlice, ...]]) -> None:
        torch.set_num_threads(1)
        self._task, self._parts = task, parts
        self._scorer = Scorer(Model(task.model, checksums=False))

    def __call__(self, row: dict[str, Any]) -> dict[str, str]:
        number = int(row["part"])
        try:
            return {"result": json.dumps(predict_part(self._task, self._scorer, number, self._parts[number]))}
        except DataError as error:
            return {"result": json.dumps({"error": error.to_dict()})}


def predict_on_ray(
    task: Task, parts: Sequence[tuple[FileSlice, ...]], left: Sequence[int], workers: int
) -> Iterator[dict[str, Any]]:
    """Runs `predict_part` for the parts in `left` on up to `workers` actors; the parts of a lost actor are repeated.

    Raises:
        DataError: the first that an actor raises.
    """
    if not ray.is_initialized():
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
    context = ray.data.DataContext.get_current().copy()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    context.actor_task_retry_on_errors = True
    with ray.data.DataContext.current(context):
        dataset = ray.data.from_items([{"part": number} for number in left], override_num_blocks=len(left))
        results = dataset.map(
            _Worker,  # type: ignore[arg-type]
            fn_constructor_args=[task, parts],
            num_cpus=1,
            concurrency=min(workers, len(left)),
        )
        for row in results.iter_rows():
            found = json.loads(row["result"])
            if "error" in found:
                raise DataError(**found["error"])
            yield found
