"""Sum of the weights of examples whose label is NaN."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class NumMissingLabelsMetric(RecMetric):
    """The metric `num_missing_labels`."""

    name = "num_missing_labels"


class NumMissingLabelsMetricComputation(MeasuredComputation):
    """The sums and figures of `num_missing_labels`, to derive from."""

    measure = ERRORS["num_missing_labels"]
