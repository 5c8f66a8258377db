"""The user's own code in training steps: `trainer.on_batch`, and metrics of the training rows."""

from __future__ import annotations

from typing import Any

import torch

from rayrec.data import Schema
from rayrec.models import Batch
from rayrec.train.config.trainer import TrainerConfig
from rayrec.train.errors import TrainError
from rayrec.train.setup import build
from rayrec.train.worker.lockstep import Control
from rayrec.train.worker.own_metrics import OwnMetrics


class StepHooks:
    """Calls `trainer.on_batch` after each step, and updates the metrics of `trainer.metrics` with `training: true`.

    Args:
        scores_rows: whether the model has logits to measure; a retriever has none.

    Raises:
        TrainError: a function or metric does not exist; see `OwnMetrics`.
    """

    def __init__(
        self, trainer: TrainerConfig, schema: Schema, control: Control, device: torch.device, scores_rows: bool
    ) -> None:
        self._path = trainer.on_batch
        self._on_batch = None if self._path is None else build.import_factory(self._path, "trainer.on_batch")
        self._configs = [metric for metric in trainer.metrics if metric.training and scores_rows]
        self._schema, self._control, self._device = schema, control, device
        self._metrics = self._new_metrics()

    def _new_metrics(self) -> OwnMetrics:
        return OwnMetrics(self._configs, self._schema, self._device)

    def after_step(self, step: int, batch: Batch, logits: torch.Tensor, loss: torch.Tensor) -> None:
        """Pass a step of this rank on.

        Args:
            step: number of the step, counted from 1.
            logits, loss: as `Learner.step` returns them.

        Raises:
            TrainError: `trainer.on_batch` failed.
        """
        if self._configs:
            self._metrics.update(logits, batch.label)
        if self._on_batch is not None:
            try:
                self._on_batch(step=step, batch=batch, logits=logits, loss=loss)
            except Exception as error:
                text = f"trainer.on_batch: {self._path} failed at step {step}: {type(error).__name__}: {error}"
                raise TrainError(text) from error

    def take_metrics(self) -> dict[str, Any]:
        """The metrics of the rows since the last call, over all ranks. A collective if there are any metrics."""
        if not self._configs:
            return {}
        metrics, self._metrics = self._metrics.compute(self._control), self._new_metrics()
        return metrics
