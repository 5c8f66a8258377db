"""Mean absolute error."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class MAEMetric(RecMetric):
    """The metric `mae`."""

    name = "mae"


class MAEMetricComputation(MeasuredComputation):
    """The sums and figures of `mae`, to derive from."""

    measure = ERRORS["mae"]
