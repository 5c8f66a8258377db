"""Weighted mean of predictions."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class WeightedAvgMetric(RecMetric):
    """The metric `weighted_avg`."""

    name = "weighted_avg"
