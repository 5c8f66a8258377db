from rayrec.torchrec.metrics.rec_metric import RecMetric


class XAUCMetric(RecMetric):
    """The metric `xauc`."""

    name = "xauc"
