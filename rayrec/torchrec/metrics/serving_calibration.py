"""Calibration, and the number of examples with a weight."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.rates import RATES
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class ServingCalibrationMetric(RecMetric):
    """The metric `serving_calibration`."""

    name = "serving_calibration"


class ServingCalibrationMetricComputation(MeasuredComputation):
    """The sums and figures of `serving_calibration`, to derive from."""

    measure = RATES["serving_calibration"]
