"""Normalized entropy of the positive examples alone."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.rates import RATES
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class NEPositiveMetric(RecMetric):
    """The metric `ne_positive`."""

    name = "ne_positive"


class NEPositiveMetricComputation(MeasuredComputation):
    """The sums and figures of `ne_positive`, to derive from."""

    measure = RATES["ne_positive"]
