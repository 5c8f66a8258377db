"""Normalized entropy with all weights 1."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.rates import RATES
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class UnweightedNEMetric(RecMetric):
    """The metric `unweighted_ne`."""

    name = "unweighted_ne"


class UnweightedNEMetricComputation(MeasuredComputation):
    """The sums and figures of `unweighted_ne`, to derive from."""

    measure = RATES["unweighted_ne"]
