"""NE of each group of examples."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class SegmentedNEMetric(RecMetric):
    """The metric `segmented_ne`."""

    name = "segmented_ne"
