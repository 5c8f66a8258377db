from rayrec.torchrec.metrics.rec_metric import RecMetric


class MulticlassRecallMetric(RecMetric):
    """The metric `multiclass_recall`."""

    name = "multiclass_recall"
