"""TorchRec's `metrics`: a module for each metric, and `RecMetricModule` for all metrics of a training."""
