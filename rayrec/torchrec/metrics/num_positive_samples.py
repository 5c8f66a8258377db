"""Sum of the weights of positives."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class NumPositiveSamplesMetric(RecMetric):
    """The metric `num_positive_samples`."""

    name = "num_positive_samples"
