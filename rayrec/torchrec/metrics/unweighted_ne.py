"""Normalized entropy with all weights 1."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class UnweightedNEMetric(RecMetric):
    """The metric `unweighted_ne`."""

    name = "unweighted_ne"
