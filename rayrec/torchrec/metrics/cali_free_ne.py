"""Calibration-free NE: NE over that of always predicting the mean prediction."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.rates import RATES
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class CaliFreeNEMetric(RecMetric):
    """The metric `cali_free_ne`."""

    name = "cali_free_ne"


class CaliFreeNEMetricComputation(MeasuredComputation):
    """The sums and figures of `cali_free_ne`, to derive from."""

    measure = RATES["cali_free_ne"]
