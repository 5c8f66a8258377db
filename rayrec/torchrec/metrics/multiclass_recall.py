"""Recall among the k most likely classes, for each k."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class MulticlassRecallMetric(RecMetric):
    """The metric `multiclass_recall`."""

    name = "multiclass_recall"


class MulticlassRecallMetricComputation(MeasuredComputation):
    """The sums and figures of `multiclass_recall`, to derive from."""

    measure = ERRORS["multiclass_recall"]
