"""Recall at a threshold."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class RecallMetric(RecMetric):
    """The metric `recall`."""

    name = "recall"


class RecallMetricComputation(MeasuredComputation):
    """The sums and figures of `recall`, to derive from."""

    measure = ERRORS["recall"]
