"""The config of `generate_metric_module`, with TorchRec's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class RecMetricEnum(Enum):
    """The metrics, by their namespaces in the report."""

    NE = "ne"
    NE_POSITIVE = "ne_positive"
    RECALIBRATED_NE = "recalibrated_ne"
    RECALIBRATED_CALIBRATION = "recalibrated_calibration"
    SEGMENTED_NE = "segmented_ne"
    LOG_LOSS = "log_loss"
    CTR = "ctr"
    AUC = "auc"
    AUPRC = "auprc"
    RAUC = "rauc"
    CALIBRATION = "calibration"
    MSE = "mse"
    MAE = "mae"
    MULTICLASS_RECALL = "multiclass_recall"
    RECALL_SESSION_LEVEL = "recall_session_level"
    PRECISION_SESSION_LEVEL = "precision_session_level"
    WEIGHTED_AVG = "weighted_avg"
    TOWER_QPS = "tower_qps"
    ACCURACY = "accuracy"
    NDCG = "ndcg"
    XAUC = "xauc"
    SCALAR = "scalar"
    PRECISION = "precision"
    RECALL = "recall"
    SERVING_NE = "serving_ne"
    SERVING_CALIBRATION = "serving_calibration"
    SERVING_AE_LOSS = "serving_ae_loss"
    OUTPUT = "output"
    TENSOR_WEIGHTED_AVG = "tensor_weighted_avg"
    CALI_FREE_NE = "cali_free_ne"
    UNWEIGHTED_NE = "unweighted_ne"
    HINDSIGHT_TARGET_PR = "hindsight_target_pr"
    NMSE = "nmse"
    AVERAGE = "average"
    MULTI_LABEL_PRECISION = "multi_label_precision"
    NUM_POSITIVE_SAMPLES = "num_positive_samples"
    SUM_WEIGHTS = "sum_weights"
    NUM_MISSING_LABELS = "num_missing_labels"
    WEIGHTED_SUM_PREDICTIONS = "weighted_sum_predictions"

    def __str__(self) -> str:
        return self.value


class StateMetricEnum(Enum):
    """Components that report their own metrics."""

    OPTIMIZERS = "optimizers"
    MODEL_CONFIGURATOR = "model_configurator"

    def __str__(self) -> str:
        return self.value


@dataclass(unsafe_hash=True)
class SessionMetricDef:
    """Sessions of examples.

    Args:
        session_var_name: the model output that holds the session of each example.
        top_threshold: number of examples per session with the highest scores that are predicted positive.
        run_ranking_of_labels: also treat this number of highest labels as positive, instead of the labels.
    """

    session_var_name: str
    top_threshold: int | None = None
    run_ranking_of_labels: bool = False


@dataclass(unsafe_hash=True)
class RecTaskInfo:
    """A task, described by names of model outputs.

    Args:
        name: name of the task in the report.
        label_name, prediction_name, weight_name: the outputs; predictions are probabilities, not logits.
        session_metric_def: sessions, for session metrics.
        is_negative_task: NDCG uses 1 - label and 1 - prediction.
        tensor_name, weighted: the output that `TENSOR_WEIGHTED_AVG` averages, and whether it uses weights.
    """

    name: str = "DefaultTask"
    label_name: str = "label"
    prediction_name: str = "prediction"
    weight_name: str = "weight"
    session_metric_def: SessionMetricDef | None = None
    is_negative_task: bool = False
    tensor_name: str | None = None
    weighted: bool = True


class RecComputeMode(Enum):
    """Whether a metric keeps its sums in one tensor per task or in one for all tasks; results are equal."""

    FUSED_TASKS_COMPUTATION = 1
    UNFUSED_TASKS_COMPUTATION = 2
    FUSED_TASKS_AND_STATES_COMPUTATION = 3


@dataclass
class RecMetricDef:
    """The tasks and options of a metric.

    Args:
        rec_tasks, rec_task_indices: either the tasks, or their indices in the config.
        window_size: examples in a window, over all ranks.
        arguments: options of the metric.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_task_indices: list[int] = field(default_factory=list)
    window_size: int = 10_000_000
    arguments: dict[str, Any] | None = None


@dataclass
class ThroughputDef:
    """Measurement of examples per second.

    Args:
        window_size: window in seconds.
        warmup_steps: batches before the measurement.
    """

    window_size: int = 100
    warmup_steps: int = 100


@dataclass
class MetricsConfig:
    """The metrics of a `RecMetricModule`.

    Args:
        rec_tasks: tasks of the model.
        rec_metrics: the metrics.
        throughput_metric: measure examples per second.
        rec_compute_mode: mode of all metrics.
        fused_update_limit: process this number of batches at a time; 0: each batch.
        state_metrics: components that report their own metrics; pass them to `generate_metric_module`.
        compute_interval_steps: number of batches between two computations.
        min_compute_interval, max_compute_interval: bounds of the time between two computations, in seconds; the second
            computation adjusts `compute_interval_steps` to them.
        compute_on_all_ranks: return metrics on all ranks instead of rank 0 only.
        should_validate_update: skip batches with zero total weight.
        enable_pt2_compile, should_clone_update_inputs, use_cpu_offloaded_rec_metric_module: ignored.

    Raises:
        ValueError: a task index out of range, or a metric of a task that is not in `rec_tasks`.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_metrics: dict[RecMetricEnum, RecMetricDef] = field(default_factory=dict)
    throughput_metric: ThroughputDef | None = None
    rec_compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION
    fused_update_limit: int = 0
    state_metrics: list[StateMetricEnum] = field(default_factory=list)
    compute_interval_steps: int = 100
    min_compute_interval: float = 0.0
    max_compute_interval: float = float("inf")
    compute_on_all_ranks: bool = False
    should_validate_update: bool = False
    enable_pt2_compile: bool = False
    should_clone_update_inputs: bool = False
    use_cpu_offloaded_rec_metric_module: bool | None = None

    def __post_init__(self) -> None:
        names = [task.name for task in self.rec_tasks]
        for metric, definition in self.rec_metrics.items():
            out_of_range = [index for index in definition.rec_task_indices if index >= len(names)]
            if out_of_range:
                raise ValueError(f"{metric}: rec_task_indices {out_of_range}, but rec_tasks has {len(names)} tasks")
            unknown = [task.name for task in definition.rec_tasks if task.name not in names]
            if unknown:
                raise ValueError(f"{metric}: tasks {unknown} are not among the model's {names}; add them to rec_tasks")


DefaultTaskInfo = RecTaskInfo()
DefaultMetricsConfig = MetricsConfig(
    rec_tasks=[DefaultTaskInfo],
    rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_tasks=[DefaultTaskInfo])},
    throughput_metric=ThroughputDef(),
)
EmptyMetricsConfig = MetricsConfig()


@dataclass
class BatchSizeStage:
    """The batch size up to an iteration.

    Args:
        batch_size: examples per rank and batch.
        max_iters: the last iteration; None: no end.
    """

    batch_size: int = 0
    max_iters: int | None = 0


def validate_batch_size_stages(batch_size_stages: Sequence[BatchSizeStage] | None) -> None:
    """Raises ValueError if the last stage has an end."""
    if batch_size_stages and batch_size_stages[-1].max_iters is not None:
        raise ValueError(f"the last stage ends at {batch_size_stages[-1].max_iters}; its max_iters must be None")
