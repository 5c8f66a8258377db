"""Precision of the first examples of each session."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class PrecisionSessionMetric(RecMetric):
    """The metric `precision_session_level`."""

    name = "precision_session_level"
