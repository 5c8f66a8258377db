"""Click-through rate: the weighted share of positives."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class CTRMetric(RecMetric):
    """The metric `ctr`."""

    name = "ctr"
