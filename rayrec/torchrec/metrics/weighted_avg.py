"""Weighted mean of predictions."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class WeightedAvgMetric(RecMetric):
    """The metric `weighted_avg`."""

    name = "weighted_avg"


class WeightedAvgMetricComputation(MeasuredComputation):
    """The sums and figures of `weighted_avg`, to derive from."""

    measure = ERRORS["weighted_avg"]
