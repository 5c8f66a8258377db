"""Mean of the labels, for figures that a model computes itself."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class ScalarMetric(RecMetric):
    """The metric `scalar`."""

    name = "scalar"


class ScalarMetricComputation(MeasuredComputation):
    """The sums and figures of `scalar`, to derive from."""

    measure = ERRORS["scalar"]
