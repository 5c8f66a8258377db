from rayrec.torchrec.metrics.rec_metric import RecMetric


class NMSEMetric(RecMetric):
    """The metric `nmse`."""

    name = "nmse"
