"""Calibration-free NE: NE over that of always predicting the mean prediction."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class CaliFreeNEMetric(RecMetric):
    """The metric `cali_free_ne`."""

    name = "cali_free_ne"
