"""Custom metrics of an evaluation: any `torchmetrics.Metric`, exact on any number of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from rayrec.data import Schema
from rayrec.train.config.trainer import MetricConfig
from rayrec.train.errors import TrainError
from rayrec.train.setup import build
from rayrec.train.worker.lockstep import Control

if TYPE_CHECKING:
    from torchmetrics import Metric

EXACT = {"dim_zero_sum", "dim_zero_cat", "dim_zero_max", "dim_zero_min"}


class OwnMetrics:
    """The metrics of `trainer.metrics` over the evaluation rows.

    Raises:
        TrainError: a factory does not exist, does not accept its arguments, or returns a metric that is not exact over
            several ranks.
    """

    def __init__(self, configs: Sequence[MetricConfig], schema: Schema, device: torch.device) -> None:
        names = [task.name for task in schema.tasks]
        self._metrics = [
            (config.name, 0 if config.label is None else names.index(config.label), metric_of(config).to(device))
            for config in configs
        ]
        self._binary = [kind == "binary" for kind in schema.label_kinds]
        self._error: Exception | None = None

    def update(self, logits: torch.Tensor, label: torch.Tensor) -> None:
        """Add a batch of this rank. Errors are raised by `compute`.

        A metric receives the predictions and values of one label, from the rows in which the label was observed:
        probabilities and 0 or 1 for a binary label, numbers otherwise.

        Args:
            logits, label: `[B]`, or `[B, T]` for several labels.
        """
        for name, task, metric in self._metrics:
            predicted, target = (x[:, task] if x.dim() == 2 else x for x in (logits.detach().float(), label))
            observed = ~target.isnan()
            predicted, target = predicted[observed], target[observed]
            if self._binary[task]:
                predicted, target = predicted.sigmoid(), target.long()
            try:
                if len(target):
                    metric.update(predicted, target)
            except Exception as error:
                self._error = self._error or TrainError(f"trainer.metrics: {name}: {error}")

    def compute(self, control: Control) -> dict[str, Any]:
        """Metrics over the rows of all ranks: numbers, lists or dicts; None without rows. A collective.

        Raises:
            RankError: a metric failed on some rank.
        """
        if not self._metrics:
            return {}
        control.together(self._raise)
        by_rank = control.gather([metric.cpu() for _, _, metric in self._metrics])
        names = [name for name, _, _ in self._metrics]
        return control.together(
            lambda: {name: _merged_value([metrics[n] for metrics in by_rank]) for n, name in enumerate(names)}
        )

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def metric_of(config: MetricConfig) -> Metric:
    """The metric of a config; raises TrainError like `OwnMetrics`."""
    # Imported here because the import takes a second.
    from torchmetrics import Metric

    field = f"trainer.metrics.{config.name}"
    try:
        metric = build.import_factory(config.factory, f"{field}.factory")(**config.args)
    except (TypeError, ValueError) as error:
        raise TrainError(f"{field}.args: {config.factory} does not accept them: {error}") from error
    if not isinstance(metric, Metric):
        raise TrainError(
            f"{field}.factory: {config.factory} returned {type(metric).__name__}, which is not a torchmetrics.Metric"
        )
    inexact = {getattr(reduce, "__name__", str(reduce)) for reduce in metric._reductions.values()} - EXACT
    if inexact or metric.full_state_update:
        raise TrainError(
            f"{field}.factory: {type(metric).__name__} cannot be merged exactly over several workers; use states "
            'with dist_reduce_fx "sum", "cat", "max" or "min", and full_state_update=False'
        )
    return metric


def _merged_value(by_rank: Sequence[Metric]) -> Any:
    """The value of a metric over the rows of all ranks."""
    updated = [metric for metric in by_rank if metric.update_called]
    if not updated:
        return None
    for metric in updated[1:]:
        metric.merge_state(updated[0])  # puts the state of earlier ranks first
        updated[0] = metric
    return _plain(updated[0].compute())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value
