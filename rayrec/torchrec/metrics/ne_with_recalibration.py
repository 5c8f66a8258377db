from rayrec.torchrec.metrics.rec_metric import RecMetric


class RecalibratedNEMetric(RecMetric):
    """The metric `recalibrated_ne`."""

    name = "recalibrated_ne"
