"""Recall among the k most likely classes, for each k."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class MulticlassRecallMetric(RecMetric):
    """The metric `multiclass_recall`."""

    name = "multiclass_recall"
