"""Regression AUC: the share of pairs of the window that predictions order as labels do."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class RAUCMetric(RecMetric):
    """The metric `rauc`."""

    name = "rauc"
