"""The weighted share of examples classified correctly at a threshold."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class AccuracyMetric(RecMetric):
    """The metric `accuracy`."""

    name = "accuracy"
