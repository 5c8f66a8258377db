"""Weighted means of labels and predictions."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class AverageMetric(RecMetric):
    """The metric `average`."""

    name = "average"
