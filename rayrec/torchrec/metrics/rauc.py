"""Regression AUC: the share of pairs of the window that predictions order as labels do."""

from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class RAUCMetric(RecMetric):
    """The metric `rauc`."""

    name = "rauc"
