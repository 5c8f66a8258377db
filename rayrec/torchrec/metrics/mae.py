"""Mean absolute error."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class MAEMetric(RecMetric):
    """The metric `mae`."""

    name = "mae"
