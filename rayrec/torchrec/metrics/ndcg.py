"""NDCG of sessions (Järvelin & Kekäläinen 2002)."""

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.streaming.sessions import SESSIONS
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class NDCGMetric(RecMetric):
    """The metric `ndcg`."""

    name = "ndcg"


class NDCGComputation(MeasuredComputation):
    """The sums and figures of `ndcg`, to derive from."""

    measure = SESSIONS["ndcg"]
