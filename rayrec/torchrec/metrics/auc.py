"""Area under the ROC curve of the window's examples, exact."""

from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class AUCMetric(RecMetric):
    """The metric `auc`."""

    name = "auc"
