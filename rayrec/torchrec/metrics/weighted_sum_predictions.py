"""Weighted sum of predictions."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class WeightedSumPredictionsMetric(RecMetric):
    """The metric `weighted_sum_predictions`."""

    name = "weighted_sum_predictions"
