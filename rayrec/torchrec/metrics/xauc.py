"""The weighted share of pairs inside a batch that predictions order as labels do."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class XAUCMetric(RecMetric):
    """The metric `xauc`."""

    name = "xauc"
