"""Sum of weights."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class SumWeightsMetric(RecMetric):
    """The metric `sum_weights`."""

    name = "sum_weights"


class SumWeightsMetricComputation(MeasuredComputation):
    """The sums and figures of `sum_weights`, to derive from."""

    measure = ERRORS["sum_weights"]
