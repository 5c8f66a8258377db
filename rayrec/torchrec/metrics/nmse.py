"""Mean squared error over that of always predicting 1."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class NMSEMetric(RecMetric):
    """The metric `nmse`."""

    name = "nmse"


class NMSEMetricComputation(MeasuredComputation):
    """The sums and figures of `nmse`, to derive from."""

    measure = ERRORS["nmse"]
