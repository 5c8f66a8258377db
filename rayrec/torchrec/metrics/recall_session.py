"""Recall of the first examples of each session."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class RecallSessionMetric(RecMetric):
    """The metric `recall_session_level`."""

    name = "recall_session_level"
