"""Weighted mean of the tensor that a task names."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class TensorWeightedAvgMetric(RecMetric):
    """The metric `tensor_weighted_avg`."""

    name = "tensor_weighted_avg"
