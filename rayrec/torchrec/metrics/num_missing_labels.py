"""Sum of the weights of examples whose label is NaN."""

from rayrec.torchrec.metrics.rec_metric import RecMetric


class NumMissingLabelsMetric(RecMetric):
    """The metric `num_missing_labels`."""

    name = "num_missing_labels"
