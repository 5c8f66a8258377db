"""Normalized entropy: cross entropy over that of always predicting the mean label."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class NEMetric(RecMetric):
    """The metric `ne`."""

    name = "ne"
