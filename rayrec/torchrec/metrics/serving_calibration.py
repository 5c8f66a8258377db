"""Calibration, and the number of examples with a weight."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class ServingCalibrationMetric(RecMetric):
    """The metric `serving_calibration`."""

    name = "serving_calibration"
