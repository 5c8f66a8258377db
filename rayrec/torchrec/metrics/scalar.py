"""Mean of the labels, for figures that a model computes itself."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class ScalarMetric(RecMetric):
    """The metric `scalar`."""

    name = "scalar"
