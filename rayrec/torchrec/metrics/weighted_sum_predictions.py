"""Weighted sum of predictions."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class WeightedSumPredictionsMetric(RecMetric):
    """The metric `weighted_sum_predictions`."""

    name = "weighted_sum_predictions"


class WeightedSumPredictionsMetricComputation(MeasuredComputation):
    """The sums and figures of `weighted_sum_predictions`, to derive from."""

    measure = ERRORS["weighted_sum_predictions"]
