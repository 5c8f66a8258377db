"""All metrics, each of which has its module under TorchRec's path."""

from rayrec.torchrec.metrics.accuracy import AccuracyMetric
from rayrec.torchrec.metrics.auc import AUCMetric
from rayrec.torchrec.metrics.auprc import AUPRCMetric
from rayrec.torchrec.metrics.average import AverageMetric
from rayrec.torchrec.metrics.cali_free_ne import CaliFreeNEMetric
from rayrec.torchrec.metrics.calibration import CalibrationMetric
from rayrec.torchrec.metrics.calibration_with_recalibration import RecalibratedCalibrationMetric
from rayrec.torchrec.metrics.ctr import CTRMetric
from rayrec.torchrec.metrics.mae import MAEMetric
from rayrec.torchrec.metrics.mse import MSEMetric
from rayrec.torchrec.metrics.multiclass_recall import MulticlassRecallMetric
from rayrec.torchrec.metrics.ndcg import NDCGMetric
from rayrec.torchrec.metrics.ne import NEMetric
from rayrec.torchrec.metrics.ne_positive import NEPositiveMetric
from rayrec.torchrec.metrics.ne_with_recalibration import RecalibratedNEMetric
from rayrec.torchrec.metrics.nmse import NMSEMetric
from rayrec.torchrec.metrics.num_missing_labels import NumMissingLabelsMetric
from rayrec.torchrec.metrics.num_positive_samples import NumPositiveSamplesMetric
from rayrec.torchrec.metrics.precision import PrecisionMetric
from rayrec.torchrec.metrics.precision_session import PrecisionSessionMetric
from rayrec.torchrec.metrics.rauc import RAUCMetric
from rayrec.torchrec.metrics.rec_metric import RecMetric
from rayrec.torchrec.metrics.recall import RecallMetric
from rayrec.torchrec.metrics.recall_session import RecallSessionMetric
from rayrec.torchrec.metrics.scalar import ScalarMetric
from rayrec.torchrec.metrics.segmented_ne import SegmentedNEMetric
from rayrec.torchrec.metrics.serving_calibration import ServingCalibrationMetric
from rayrec.torchrec.metrics.serving_ne import ServingNEMetric
from rayrec.torchrec.metrics.sum_weights import SumWeightsMetric
from rayrec.torchrec.metrics.tensor_weighted_avg import TensorWeightedAvgMetric
from rayrec.torchrec.metrics.tower_qps import TowerQPSMetric
from rayrec.torchrec.metrics.unweighted_ne import UnweightedNEMetric
from rayrec.torchrec.metrics.weighted_avg import WeightedAvgMetric
from rayrec.torchrec.metrics.weighted_sum_predictions import WeightedSumPredictionsMetric
from rayrec.torchrec.metrics.xauc import XAUCMetric

ALL_METRICS: tuple[type[RecMetric], ...] = (
    NEMetric,
    NEPositiveMetric,
    UnweightedNEMetric,
    CaliFreeNEMetric,
    RecalibratedNEMetric,
    ServingNEMetric,
    SegmentedNEMetric,
    CalibrationMetric,
    RecalibratedCalibrationMetric,
    ServingCalibrationMetric,
    CTRMetric,
    AUCMetric,
    AUPRCMetric,
    RAUCMetric,
    XAUCMetric,
    MSEMetric,
    NMSEMetric,
    MAEMetric,
    AccuracyMetric,
    PrecisionMetric,
    RecallMetric,
    MulticlassRecallMetric,
    RecallSessionMetric,
    PrecisionSessionMetric,
    NDCGMetric,
    AverageMetric,
    WeightedAvgMetric,
    TensorWeightedAvgMetric,
    ScalarMetric,
    NumPositiveSamplesMetric,
    NumMissingLabelsMetric,
    SumWeightsMetric,
    WeightedSumPredictionsMetric,
    TowerQPSMetric,
)
