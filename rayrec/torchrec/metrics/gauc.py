"""Exact mean area under the ROC curve over sessions, which are consecutive examples of a batch."""

from __future__ import annotations

from typing import Any

import torch

from rayrec.torchrec.metrics.computation import MetricComputationReport, RecMetricComputation
from rayrec.torchrec.metrics.metrics_namespace import MetricName, MetricNamespace, MetricPrefix
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.samples import auc
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class GAUCMetricComputation(RecMetricComputation):
    """Sum of the areas of sessions, and the number of sessions that have both labels with nonzero weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in ("auc_sum", "num_samples"):
            zeros = torch.zeros(self._n_tasks, dtype=torch.float64)
            self._add_state(name, zeros, add_window_state=True, persistent=True)

    @torch.no_grad()
    def update(  # type: ignore[override]  # it needs one more input
        self,
        *,
        predictions: torch.Tensor | None,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
        num_candidates: torch.Tensor,
        **kwargs: Any,
    ) -> None:
        """Adds a batch.

        Args:
            predictions, labels, weights: [T, B].
            num_candidates: number of examples of each session, in the order of the batch.

        Raises:
            ValueError: the sessions do not add up to the batch.
        """
        sizes = num_candidates.flatten().tolist()
        if predictions is None or sum(sizes) != labels.shape[-1]:
            raise ValueError(f"num_candidates sums to {sum(sizes)}, but the batch has {labels.shape[-1]} examples")
        weights = torch.ones_like(labels) if weights is None else weights
        areas_TS, counted_TS = [], []
        for scores_TB, labels_TB, weights_TB in zip(
            predictions.split(sizes, 1), labels.split(sizes, 1), weights.split(sizes, 1), strict=True
        ):
            has_both_labels_T = ((weights_TB * labels_TB).sum(-1) > 0) & ((weights_TB * (1 - labels_TB)).sum(-1) > 0)
            areas = [auc(*task) for task in zip(scores_TB, labels_TB, weights_TB, strict=True)]
            areas_TS.append(torch.stack(areas) * has_both_labels_T)
            counted_TS.append(has_both_labels_T)
        for name, values in (("auc_sum", areas_TS), ("num_samples", counted_TS)):
            value = torch.stack(values, dim=1).double().sum(1).to(self.auc_sum.device)
            getattr(self, name).add_(value)
            self._aggregate_window_state(name, value, labels.shape[-1])

    auc_sum: torch.Tensor
    num_samples: torch.Tensor

    def _compute(self) -> list[MetricComputationReport]:
        lifetime = (MetricPrefix.LIFETIME, self.auc_sum, self.num_samples)
        window = (MetricPrefix.WINDOW, self.get_window_state("auc_sum"), self.get_window_state("num_samples"))
        reports = []
        for prefix, total, count in (lifetime, window):
            mean = torch.where(count > 0, total / count.clamp(min=1), 0.5)
            reports.append(MetricComputationReport(MetricName.GAUC, prefix, mean))
            reports.append(MetricComputationReport(MetricName.GAUC_NUM_SAMPLES, prefix, count))
        return reports


class GAUCMetric(RecMetric):
    """Mean AUC over sessions; `update` also takes `num_candidates`, the number of examples of each session."""

    _namespace = MetricNamespace.GAUC
    _computation_class = GAUCMetricComputation
