"""Sum of the weights of positives."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class NumPositiveSamplesMetric(RecMetric):
    """The metric `num_positive_samples`."""

    name = "num_positive_samples"


class NumPositiveSamplesMetricComputation(MeasuredComputation):
    """The sums and figures of `num_positive_samples`, to derive from."""

    measure = ERRORS["num_positive_samples"]
