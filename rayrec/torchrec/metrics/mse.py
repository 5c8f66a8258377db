"""Mean squared error, its root, and R²."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class MSEMetric(RecMetric):
    """The metric `mse`."""

    name = "mse"
