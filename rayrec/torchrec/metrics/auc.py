"""Area under the ROC curve of the window's examples, exact."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class AUCMetric(RecMetric):
    """The metric `auc`."""

    name = "auc"
