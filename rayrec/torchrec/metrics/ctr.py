"""Click-through rate: the weighted share of positives."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.rates import RATES
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class CTRMetric(RecMetric):
    """The metric `ctr`."""

    name = "ctr"


class CTRMetricComputation(MeasuredComputation):
    """The sums and figures of `ctr`, to derive from."""

    measure = RATES["ctr"]
