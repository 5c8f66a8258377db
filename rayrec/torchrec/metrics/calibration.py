"""Sum of predictions over sum of labels."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class CalibrationMetric(RecMetric):
    """The metric `calibration`."""

    name = "calibration"
