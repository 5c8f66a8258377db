from rayrec.torchrec.metrics.rec_metric import RecMetric


class RAUCMetric(RecMetric):
    """The metric `rauc`."""

    name = "rauc"
