from rayrec.torchrec.metrics.rec_metric import RecMetric


class AUPRCMetric(RecMetric):
    """The metric `auprc`."""

    name = "auprc"
