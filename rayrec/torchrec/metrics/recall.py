"""Recall at a threshold."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class RecallMetric(RecMetric):
    """The metric `recall`."""

    name = "recall"
