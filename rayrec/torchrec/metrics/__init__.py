"""`torchrec.metrics`: a module for each metric, and `RecMetricModule` for all metrics of a training job."""

from rayrec.torchrec.metrics import all_metrics  # noqa: F401 - creates the modules of the metrics
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)
