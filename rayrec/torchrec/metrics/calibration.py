"""Sum of predictions over sum of labels."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.rates import RATES
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class CalibrationMetric(RecMetric):
    """The metric `calibration`."""

    name = "calibration"


class CalibrationMetricComputation(MeasuredComputation):
    """The sums and figures of `calibration`, to derive from."""

    measure = RATES["calibration"]
