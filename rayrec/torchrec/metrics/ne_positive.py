"""Normalized entropy of the positive examples alone."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class NEPositiveMetric(RecMetric):
    """The metric `ne_positive`."""

    name = "ne_positive"
