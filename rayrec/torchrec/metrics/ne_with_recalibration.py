"""NE of predictions corrected for a model that was trained on a sample of the negatives."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class RecalibratedNEMetric(RecMetric):
    """The metric `recalibrated_ne`."""

    name = "recalibrated_ne"
