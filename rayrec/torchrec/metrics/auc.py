from rayrec.torchrec.metrics.rec_metric import RecMetric


class AUCMetric(RecMetric):
    """The metric `auc`."""

    name = "auc"
