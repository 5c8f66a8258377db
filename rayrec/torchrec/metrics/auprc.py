"""Area under the precision-recall curve of the window's examples, exact."""

from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class AUPRCMetric(RecMetric):
    """The metric `auprc`."""

    name = "auprc"
