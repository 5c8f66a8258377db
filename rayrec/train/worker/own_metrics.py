"""A user's own figures of an evaluation: any `torchmetrics.Metric`, exact on any number of ranks."""

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
    """The metrics of `trainer.metrics`, over the evaluation rows.

    Raises:
        TrainError: a factory that is not there, does not take its arguments, or makes no metric that is exact.
    """

    def __init__(self, configs: Sequence[MetricConfig], schema: Schema, device: torch.device) -> None:
        names = [task.name for task in schema.tasks]
        self._parts = [
            (config.name, 0 if config.label is None else names.index(config.label), made(config).to(device))
            for config in configs
        ]
        self._binary = [kind == "binary" for kind in schema.label_kinds]
        self._error: Exception | None = None

    def update(self, logits: torch.Tensor, label: torch.Tensor) -> None:
        """One batch of this rank, `[B]` or `[B, T]` both: a metric gets the probabilities and 0 or 1 of one label (of
        a number, its prediction and itself), of the rows in which it was observed. An error waits for `compute`."""
        for name, place, metric in self._parts:
            predicted, target = (x[:, place] if x.dim() == 2 else x for x in (logits.detach().float(), label))
            seen = ~target.isnan()
            predicted, target = predicted[seen], target[seen]
            if self._binary[place]:
                predicted, target = predicted.sigmoid(), target.long()
            try:
                if len(target):
                    metric.update(predicted, target)
            except Exception as error:
                self._error = self._error or TrainError(f"trainer.metrics: {name}: {error}")

    def compute(self, control: Control) -> dict[str, Any]:
        """Figures over all ranks' rows: numbers, lists of them, or by name; None where no row was seen.

        Raises:
            RankError: a metric failed, on any rank.
        """
        if not self._parts:
            return {}
        control.together(self._raise)
        by_rank = control.gather([metric.cpu() for _, _, metric in self._parts])
        return control.together(
            lambda: {part[0]: _joined([of[n] for of in by_rank]) for n, part in enumerate(self._parts)}
        )

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def made(config: MetricConfig) -> Metric:
    """The metric of a config; raises TrainError as `OwnMetrics`."""
    from torchmetrics import Metric  # takes a second, which runs without own metrics need not wait

    field = f"trainer.metrics.{config.name}"
    try:
        metric = build.import_factory(config.factory, f"{field}.factory")(**config.args)
    except (TypeError, ValueError) as error:
        raise TrainError(f"{field}.args: {config.factory} does not take them: {error}") from error
    if not isinstance(metric, Metric):
        raise TrainError(
            f"{field}.factory: {config.factory} made {type(metric).__name__}; a torchmetrics.Metric is needed"
        )
    inexact = {getattr(how, "__name__", str(how)) for how in metric._reductions.values()} - EXACT
    if inexact or metric.full_state_update:
        raise TrainError(
            f"{field}.factory: states of {type(metric).__name__} of several workers do not add up exactly; keep states "
            'with dist_reduce_fx "sum", "cat", "max" or "min", and full_state_update=False'
        )
    return metric


def _joined(by_rank: Sequence[Metric]) -> Any:
    """The figure over what all ranks have seen."""
    used = [metric for metric in by_rank if metric.update_called]
    if not used:
        return None
    for metric in used[1:]:
        metric.merge_state(used[0])  # what is merged comes first
        used[0] = metric
    return _plain(used[0].compute())


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(of) for name, of in value.items()}
    return value.tolist() if isinstance(value, torch.Tensor) else value
