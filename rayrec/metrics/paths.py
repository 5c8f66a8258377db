"""Each metric of tasks under the module and class that TorchRec has it in: `from rayrec.metrics.ne import NEMetric`.

Such a module is made when it is imported; what there is stands in one table.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

METRICS = {  # name in RecMetricEnum: (module, class)
    "ne": ("ne", "NEMetric"),
    "ne_positive": ("ne_positive", "NEPositiveMetric"),
    "unweighted_ne": ("unweighted_ne", "UnweightedNEMetric"),
    "cali_free_ne": ("cali_free_ne", "CaliFreeNEMetric"),
    "recalibrated_ne": ("ne_with_recalibration", "RecalibratedNEMetric"),
    "serving_ne": ("serving_ne", "ServingNEMetric"),
    "segmented_ne": ("segmented_ne", "SegmentedNEMetric"),
    "calibration": ("calibration", "CalibrationMetric"),
    "recalibrated_calibration": ("calibration_with_recalibration", "RecalibratedCalibrationMetric"),
    "serving_calibration": ("serving_calibration", "ServingCalibrationMetric"),
    "ctr": ("ctr", "CTRMetric"),
    "auc": ("auc", "AUCMetric"),
    "auprc": ("auprc", "AUPRCMetric"),
    "rauc": ("rauc", "RAUCMetric"),
    "xauc": ("xauc", "XAUCMetric"),
    "mse": ("mse", "MSEMetric"),
    "nmse": ("nmse", "NMSEMetric"),
    "mae": ("mae", "MAEMetric"),
    "accuracy": ("accuracy", "AccuracyMetric"),
    "precision": ("precision", "PrecisionMetric"),
    "recall": ("recall", "RecallMetric"),
    "multiclass_recall": ("multiclass_recall", "MulticlassRecallMetric"),
    "recall_session_level": ("recall_session", "RecallSessionMetric"),
    "precision_session_level": ("precision_session", "PrecisionSessionMetric"),
    "ndcg": ("ndcg", "NDCGMetric"),
    "average": ("average", "AverageMetric"),
    "weighted_avg": ("weighted_avg", "WeightedAvgMetric"),
    "tensor_weighted_avg": ("tensor_weighted_avg", "TensorWeightedAvgMetric"),
    "scalar": ("scalar", "ScalarMetric"),
    "num_positive_samples": ("num_positive_samples", "NumPositiveSamplesMetric"),
    "num_missing_labels": ("num_missing_labels", "NumMissingLabelsMetric"),
    "sum_weights": ("sum_weights", "SumWeightsMetric"),
    "weighted_sum_predictions": ("weighted_sum_predictions", "WeightedSumPredictionsMetric"),
    "tower_qps": ("tower_qps", "TowerQPSMetric"),
}
_PREFIX = "rayrec.metrics."
_BY_MODULE = {_PREFIX + module: (name, class_name) for name, (module, class_name) in METRICS.items()}


class _Loader(Loader):
    def exec_module(self, module: ModuleType) -> None:
        from rayrec.metrics.metric_module import REC_METRICS_MAPPING, RecMetricEnum

        name, class_name = _BY_MODULE[module.__name__]
        setattr(module, class_name, REC_METRICS_MAPPING[RecMetricEnum(name)])


class _Finder(MetaPathFinder):
    """Asked after the files."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> ModuleSpec | None:
        return spec_from_loader(name, _Loader()) if name in _BY_MODULE else None


def install() -> None:
    """Makes the modules importable."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())
