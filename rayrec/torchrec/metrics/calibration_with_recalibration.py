"""Calibration of predictions corrected for a model that was trained on a sample of the negatives."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class RecalibratedCalibrationMetric(RecMetric):
    """The metric `recalibrated_calibration`."""

    name = "recalibrated_calibration"
