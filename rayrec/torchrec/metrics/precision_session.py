"""Precision of the first examples of each session."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.sessions import SESSIONS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class PrecisionSessionMetric(RecMetric):
    """The metric `precision_session_level`."""

    name = "precision_session_level"


class PrecisionSessionMetricComputation(MeasuredComputation):
    """The sums and figures of `precision_session_level`, to derive from."""

    measure = SESSIONS["precision_session_level"]
