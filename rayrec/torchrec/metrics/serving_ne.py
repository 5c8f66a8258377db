"""NE, and the number of examples with a weight."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class ServingNEMetric(RecMetric):
    """The metric `serving_ne`."""

    name = "serving_ne"
