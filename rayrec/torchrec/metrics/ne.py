"""Normalized entropy: cross entropy over that of always predicting the mean label."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.rates import RATES
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class NEMetric(RecMetric):
    """The metric `ne`."""

    name = "ne"


class NEMetricComputation(MeasuredComputation):
    """The sums and figures of `ne`, to derive from."""

    measure = RATES["ne"]
