"""The weighted share of pairs inside a batch that predictions order as labels do."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.sessions import SESSIONS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class XAUCMetric(RecMetric):
    """The metric `xauc`."""

    name = "xauc"


class XAUCMetricComputation(MeasuredComputation):
    """The sums and figures of `xauc`, to derive from."""

    measure = SESSIONS["xauc"]
