"""NDCG of sessions (Järvelin & Kekäläinen 2002)."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class NDCGMetric(RecMetric):
    """The metric `ndcg`."""

    name = "ndcg"
