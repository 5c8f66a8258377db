"""Precision at a threshold."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class PrecisionMetric(RecMetric):
    """The metric `precision`."""

    name = "precision"


class PrecisionMetricComputation(MeasuredComputation):
    """The sums and figures of `precision`, to derive from."""

    measure = ERRORS["precision"]
