"""Weighted mean of the tensor that a task names."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.sessions import SESSIONS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class TensorWeightedAvgMetric(RecMetric):
    """The metric `tensor_weighted_avg`."""

    name = "tensor_weighted_avg"


class TensorWeightedAvgMetricComputation(MeasuredComputation):
    """The sums and figures of `tensor_weighted_avg`, to derive from."""

    measure = SESSIONS["tensor_weighted_avg"]
