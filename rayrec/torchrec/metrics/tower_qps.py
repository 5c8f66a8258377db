"""Examples per second of each task."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class TowerQPSMetric(RecMetric):
    """The metric `tower_qps`."""

    name = "tower_qps"
