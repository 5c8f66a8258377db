"""Precision at a threshold."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class PrecisionMetric(RecMetric):
    """The metric `precision`."""

    name = "precision"
