from rayrec.torchrec.metrics.rec_metric import RecMetric


class AccuracyMetric(RecMetric):
    """The metric `accuracy`."""

    name = "accuracy"
