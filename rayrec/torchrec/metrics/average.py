"""Weighted means of labels and predictions."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class AverageMetric(RecMetric):
    """The metric `average`."""

    name = "average"


class AverageMetricComputation(MeasuredComputation):
    """The sums and figures of `average`, to derive from."""

    measure = ERRORS["average"]
