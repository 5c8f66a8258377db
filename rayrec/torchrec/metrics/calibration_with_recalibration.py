"""Calibration of predictions corrected for a model that was trained on a sample of the negatives."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.rates import RATES
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class RecalibratedCalibrationMetric(RecMetric):
    """The metric `recalibrated_calibration`."""

    name = "recalibrated_calibration"


class RecalibratedCalibrationMetricComputation(MeasuredComputation):
    """The sums and figures of `recalibrated_calibration`, to derive from."""

    measure = RATES["recalibrated_calibration"]
