"""TorchRec's module of each metric, from one table: `torchrec.metrics.ne` has `NEMetric` and `NEMetricComputation`.

Importing this file creates the modules, so the package's `__init__` imports it. The formulas are in `streaming`.
"""

from __future__ import annotations

import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import NamedTuple

from rayrec.torchrec.metrics.computation import MeasuredComputation
from rayrec.torchrec.metrics.rec_metric import MEASURES, RecMetric
from rayrec.torchrec.not_offered import names_left_out


class Row(NamedTuple):
    """The module of one metric.

    Args:
        module: last part of its path.
        metric: the metric's class.
        text: definition of the metric.
        name: the metric's name in `RecMetricEnum`; default: `module`.
        computation: the class of its sums, for users to derive from; by default the metric's with `Computation`
            appended. A metric that is not computed from sums has none.
    """

    module: str
    metric: str
    text: str
    name: str = ""
    computation: str = ""


TABLE = (
    Row("ne", "NEMetric", "Normalized entropy: cross entropy relative to always predicting the mean label."),
    Row("ne_positive", "NEPositiveMetric", "Normalized entropy of the positive examples only."),
    Row("unweighted_ne", "UnweightedNEMetric", "Normalized entropy with all weights 1."),
    Row(
        "cali_free_ne",
        "CaliFreeNEMetric",
        "Calibration-free NE: NE relative to always predicting the mean prediction.",
    ),
    Row(
        "ne_with_recalibration",
        "RecalibratedNEMetric",
        "NE of predictions that are corrected for downsampled negatives.",
        name="recalibrated_ne",
    ),
    Row("serving_ne", "ServingNEMetric", "NE, and the number of examples with nonzero weight."),
    Row("segmented_ne", "SegmentedNEMetric", "NE of each group of examples."),
    Row("calibration", "CalibrationMetric", "Sum of predictions divided by sum of labels."),
    Row(
        "calibration_with_recalibration",
        "RecalibratedCalibrationMetric",
        "Calibration of predictions that are corrected for downsampled negatives.",
        name="recalibrated_calibration",
    ),
    Row(
        "serving_calibration",
        "ServingCalibrationMetric",
        "Calibration, and the number of examples with nonzero weight.",
    ),
    Row("ctr", "CTRMetric", "Click-through rate: the weighted fraction of positives."),
    Row("auc", "AUCMetric", "Exact area under the ROC curve over the window's examples."),
    Row("auprc", "AUPRCMetric", "Exact area under the precision-recall curve over the window's examples."),
    Row(
        "rauc", "RAUCMetric", "Regression AUC: the fraction of the window's pairs that predictions order as labels do."
    ),
    Row("xauc", "XAUCMetric", "The weighted fraction of pairs in a batch that predictions order as labels do."),
    Row("mse", "MSEMetric", "Mean squared error, its root, and R²."),
    Row("nmse", "NMSEMetric", "Mean squared error relative to always predicting 1."),
    Row("mae", "MAEMetric", "Mean absolute error."),
    Row(
        "accuracy", "AccuracyMetric", "Accuracy: the weighted fraction of examples classified correctly at a threshold."
    ),
    Row("precision", "PrecisionMetric", "Precision at a threshold."),
    Row("recall", "RecallMetric", "Recall at a threshold."),
    Row("multiclass_recall", "MulticlassRecallMetric", "Recall among the k most likely classes, for each k."),
    Row(
        "recall_session",
        "RecallSessionMetric",
        "Recall of the first examples of each session.",
        name="recall_session_level",
    ),
    Row(
        "precision_session",
        "PrecisionSessionMetric",
        "Precision of the first examples of each session.",
        name="precision_session_level",
    ),
    Row("ndcg", "NDCGMetric", "NDCG of sessions (Järvelin & Kekäläinen 2002).", computation="NDCGComputation"),
    Row("average", "AverageMetric", "Weighted means of labels and predictions."),
    Row("weighted_avg", "WeightedAvgMetric", "Weighted mean of predictions."),
    Row("tensor_weighted_avg", "TensorWeightedAvgMetric", "Weighted mean of the tensor that a task names."),
    Row("scalar", "ScalarMetric", "Mean of the labels, for values that a model computes itself."),
    Row("num_positive_samples", "NumPositiveSamplesMetric", "Sum of the weights of positives."),
    Row("num_missing_labels", "NumMissingLabelsMetric", "Sum of the weights of examples with a NaN label."),
    Row("sum_weights", "SumWeightsMetric", "Sum of weights."),
    Row("weighted_sum_predictions", "WeightedSumPredictionsMetric", "Weighted sum of predictions."),
    Row("tower_qps", "TowerQPSMetric", "Examples per second of each task."),
)


def _metric_class(row: Row) -> type[RecMetric]:
    """Creates the module of a metric with its classes, which have its path as `__module__`, so they pickle.

    Returns:
        The metric's class.
    """
    module = ModuleType(f"{__package__}.{row.module}", row.text)
    module.__spec__ = ModuleSpec(module.__name__, None)
    vars(module)["__getattr__"] = names_left_out(module.__name__)
    name = row.name or row.module
    metric = type(row.metric, (RecMetric,), {"__module__": module.__name__, "__doc__": row.text, "name": name})
    vars(module)[row.metric] = metric
    if name in MEASURES:
        computation = row.computation or f"{row.metric}Computation"
        text = f"The sums and values of `{name}`, to derive from."
        fields = {"__module__": module.__name__, "__doc__": text, "measure": MEASURES[name]}
        vars(module)[computation] = type(computation, (MeasuredComputation,), fields)
    sys.modules[module.__name__] = module
    # Python's import sets this attribute only for modules that it loads itself.
    setattr(sys.modules[__package__], row.module, module)
    return metric


ALL_METRICS: tuple[type[RecMetric], ...] = tuple(map(_metric_class, TABLE))
