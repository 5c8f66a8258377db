"""Mean squared error, its root, and R²."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class MSEMetric(RecMetric):
    """The metric `mse`."""

    name = "mse"


class MSEMetricComputation(MeasuredComputation):
    """The sums and figures of `mse`, to derive from."""

    measure = ERRORS["mse"]
