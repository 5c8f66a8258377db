"""Sum of weights."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class SumWeightsMetric(RecMetric):
    """The metric `sum_weights`."""

    name = "sum_weights"
