"""TorchRec's `metrics`: a module for each metric, and `RecMetricModule` for all metrics of a training."""

from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)
