"""Mean squared error over that of always predicting 1."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class NMSEMetric(RecMetric):
    """The metric `nmse`."""

    name = "nmse"
