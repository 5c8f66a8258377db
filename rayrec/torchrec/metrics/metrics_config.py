"""What `generate_metric_module` builds, under TorchRec's names."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)


class RecMetricEnum(Enum):
    """The metrics, by the namespace that they report under."""

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
    """How examples form sessions.

    Args:
        session_var_name: the model's output with each example's session.
        top_threshold: the first so many of a session are called positive.
        run_ranking_of_labels: call the labels' first so many positive too, in place of the labels.
    """

    session_var_name: str
    top_threshold: int | None = None
    run_ranking_of_labels: bool = False


@dataclass(unsafe_hash=True)
class RecTaskInfo:
    """A task, by the names of the model's outputs.

    Args:
        name: under which its figures are reported.
        label_name, prediction_name, weight_name: the outputs; predictions are probabilities, not logits.
        session_metric_def: for session metrics.
        is_negative_task: NDCG takes label and prediction from 1.
        tensor_name, weighted: for `TENSOR_WEIGHTED_AVG`, what is averaged, and whether with weights.
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
    """Whether a metric keeps one tensor of sums for each task or one for all; the figures are the same."""

    FUSED_TASKS_COMPUTATION = 1
    UNFUSED_TASKS_COMPUTATION = 2
    FUSED_TASKS_AND_STATES_COMPUTATION = 3


@dataclass
class RecMetricDef:
    """A metric of some tasks.

    Args:
        rec_tasks, rec_task_indices: the tasks, or their places in the config's list: one of the two.
        window_size: examples in a window, over all ranks.
        arguments: the metric's own options.
    """

    rec_tasks: list[RecTaskInfo] = field(default_factory=list)
    rec_task_indices: list[int] = field(default_factory=list)
    window_size: int = 10_000_000
    arguments: dict[str, Any] | None = None


@dataclass
class ThroughputDef:
    """Examples per second.

    Args:
        window_size: seconds in a window.
        warmup_steps: batches before the clock starts.
    """

    window_size: int = 100
    warmup_steps: int = 100


@dataclass
class MetricsConfig:
    """The metrics of a `RecMetricModule`.

    Args:
        rec_tasks: the model's tasks.
        rec_metrics: the metrics.
        throughput_metric: measure examples per second.
        rec_compute_mode: for all metrics.
        fused_update_limit: add so many batches at a time; 0: each by itself.
        state_metrics: metrics of other parts, given to `generate_metric_module`.
        compute_interval_steps: `should_compute` says yes once in so many batches.
        min_compute_interval, max_compute_interval: seconds; the steps are set so that the time between the first two
            computations falls between them.
        compute_on_all_ranks: give figures on all ranks, not on rank 0 alone.
        should_validate_update: skip batches whose weights are all 0.
        enable_pt2_compile: taken; figures are not compiled.
        should_clone_update_inputs: taken; outputs of the model are never written to.
        use_cpu_offloaded_rec_metric_module: taken; there is one kind.

    Raises:
        ValueError: a task's place beyond the list, or a metric of a task that is not the model's, which nothing would
            ever be added to.
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
        for metric, of in self.rec_metrics.items():
            beyond = [place for place in of.rec_task_indices if place >= len(self.rec_tasks)]
            if beyond:
                raise ValueError(f"{metric}: rec_task_indices {beyond}, but rec_tasks has {len(self.rec_tasks)} tasks")
            own = [task.name for task in self.rec_tasks]
            strange = [task.name for task in of.rec_tasks if task.name not in own]
            if strange:
                raise ValueError(f"{metric}: tasks {strange} are not among the model's, {own}: add them to rec_tasks")


DefaultTaskInfo = RecTaskInfo()
DefaultMetricsConfig = MetricsConfig(
    rec_tasks=[DefaultTaskInfo],
    rec_metrics={RecMetricEnum.NE: RecMetricDef(rec_tasks=[DefaultTaskInfo])},
    throughput_metric=ThroughputDef(),
)
EmptyMetricsConfig = MetricsConfig()


@dataclass
class BatchSizeStage:
    """A batch size up to an iteration.

    Args:
        batch_size: of a rank.
        max_iters: the last iteration; None: for ever.
    """

    batch_size: int = 0
    max_iters: int | None = 0


def validate_batch_size_stages(batch_size_stages: Sequence[BatchSizeStage] | None) -> None:
    """Raises ValueError if the last stage has an end."""
    if batch_size_stages and batch_size_stages[-1].max_iters is not None:
        raise ValueError(f"the last stage ends at {batch_size_stages[-1].max_iters}; its max_iters must be None")
