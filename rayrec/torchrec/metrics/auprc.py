"""Area under the precision-recall curve of the window's examples, exact."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class AUPRCMetric(RecMetric):
    """The metric `auprc`."""

    name = "auprc"
