"""Examples per second of each task."""

from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class TowerQPSMetric(RecMetric):
    """The metric `tower_qps`."""

    name = "tower_qps"
