"""NE of each group of examples."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.rates import RATES
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class SegmentedNEMetric(RecMetric):
    """The metric `segmented_ne`."""

    name = "segmented_ne"


class SegmentedNEMetricComputation(MeasuredComputation):
    """The sums and figures of `segmented_ne`, to derive from."""

    measure = RATES["segmented_ne"]
