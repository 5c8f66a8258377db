"""`RecMetricModule`, all metrics of a training job under TorchRec's names, and `generate_metric_module`."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rayrec.distributed.comm import all_gather_object
from rayrec.torchrec.metrics.all_metrics import ALL_METRICS
from rayrec.torchrec.metrics.metrics_config import (
    BatchSizeStage,
    MetricsConfig,
    RecMetricDef,
    RecMetricEnum,
    RecTaskInfo,
    StateMetricEnum,
    validate_batch_size_stages,
)
from rayrec.torchrec.metrics.metrics_namespace import compose_customized_metric_key, compose_metric_namespace
from rayrec.torchrec.metrics.model_utils import parse_task_model_outputs
from rayrec.torchrec.metrics.rec_metric import RecMetric, RecMetricException, RecMetricList, group_of
from rayrec.torchrec.metrics.throughput import ThroughputMetric

if TYPE_CHECKING:
    import torch.distributed as dist

REC_METRICS_MAPPING: dict[RecMetricEnum, type[RecMetric]] = {
    RecMetricEnum(metric.name): metric for metric in ALL_METRICS
}
NOT_OFFERED = {
    RecMetricEnum.LOG_LOSS: "RecMetricEnum.NE with arguments={'include_logloss': True}",
    RecMetricEnum.OUTPUT: "RecMetricEnum.SCALAR of a task with this output as its label",
    RecMetricEnum.HINDSIGHT_TARGET_PR: "RecMetricEnum.PRECISION and RECALL with a threshold",
    RecMetricEnum.MULTI_LABEL_PRECISION: "a task for each label, with RecMetricEnum.PRECISION",
    RecMetricEnum.SERVING_AE_LOSS: "RecMetricEnum.MAE",
}


class StateMetric(ABC):
    """A component that reports its own metrics."""

    @abstractmethod
    def get_metrics(self) -> dict[str, Any]:
        """Returns the metrics by name."""


class MetricsResult(dict[str, Any]):
    """Metrics by key. The methods are for code that expects an asynchronous result."""

    def resolve(self) -> dict[str, Any]:
        return self

    def is_resolved(self) -> bool:
        return True

    def subscribe(
        self, callback: Callable[[dict[str, Any]], None], on_error: Callable[[Exception], None] | None = None
    ) -> None:
        callback(self)


class RecMetricModule(torch.nn.Module):
    """All metrics of a training job.

    Args:
        batch_size: examples per rank and batch.
        world_size: number of ranks.
        rec_tasks: tasks of the model.
        rec_metrics: the metrics.
        throughput_metric: measures examples per second.
        state_metrics: components that report their own metrics, by namespace.
        compute_interval_steps: number of batches between two computations.
        min_compute_interval, max_compute_interval: bounds of the time between two computations, in seconds; the second
            computation adjusts `compute_interval_steps` to them.

    Raises:
        ValueError: an interval below 0.
    """

    def __init__(
        self,
        batch_size: int,
        world_size: int,
        rec_tasks: list[RecTaskInfo] | None = None,
        rec_metrics: RecMetricList | None = None,
        throughput_metric: ThroughputMetric | None = None,
        state_metrics: dict[str, StateMetric] | None = None,
        compute_interval_steps: int = 100,
        min_compute_interval: float = 0.0,
        max_compute_interval: float = float("inf"),
    ) -> None:
        super().__init__()
        if max_compute_interval <= 0 or min_compute_interval < 0:
            raise ValueError(f"compute intervals of {min_compute_interval} to {max_compute_interval} seconds")
        self.batch_size, self.world_size = batch_size, world_size
        self.rec_tasks = rec_tasks or []
        self.rec_metrics = RecMetricList([]) if rec_metrics is None else rec_metrics
        self.throughput_metric, self.state_metrics = throughput_metric, state_metrics or {}
        self.trained_batches, self.compute_count = 0, 0
        self.compute_interval_steps = compute_interval_steps
        self._bounds_s = (min_compute_interval, max_compute_interval)
        self._computed_at: float | None = None

    def update(self, model_out: dict[str, torch.Tensor], **kwargs: Any) -> None:
        """Adds a batch.

        Args:
            model_out: outputs of the model by name: label, weight and prediction (a probability) of each task, each
                [B].

        Raises:
            ValueError: an output of a task is missing, or its size differs from that of the label.
        """
        if len(self.rec_metrics) and self.rec_tasks:
            needed = self.get_required_inputs()
            labels, predictions, weights, inputs = parse_task_model_outputs(self.rec_tasks, model_out, needed)
            if needed:
                kwargs["required_inputs"] = inputs
            self.rec_metrics.update(labels=labels, predictions=predictions, weights=weights, **kwargs)
        if self.throughput_metric is not None:
            self.throughput_metric.update()
        self.trained_batches += 1

    def should_compute(self) -> bool:
        """Whether to call `compute` after this batch."""
        return self.trained_batches % self.compute_interval_steps == 0

    def compute(self) -> MetricsResult:
        """Returns all metrics over all ranks. Collective. By default, only rank 0 gets the metrics of tasks."""
        self.compute_count += 1
        result = MetricsResult()
        if len(self.rec_metrics):
            self._adjust_interval()
            result.update(self.rec_metrics.compute())
        if self.throughput_metric is not None:
            result.update(self.throughput_metric.compute())
        for namespace, component in self.state_metrics.items():
            metrics = component.get_metrics().items()
            result.update({compose_customized_metric_key(namespace, name): value for name, value in metrics})
        return result

    def local_compute(self) -> MetricsResult:
        """Returns the metrics of tasks on this rank only, with the prefix `local_`."""
        return MetricsResult(self.rec_metrics.local_compute())

    def sync(self) -> None:
        """Replaces the state by the sum over ranks, for a checkpoint, until `unsync`."""
        self.rec_metrics.sync()

    def unsync(self) -> None:
        """Restores the state of this rank."""
        self.rec_metrics.unsync()

    def reset(self) -> None:
        """Resets the metrics of tasks."""
        self.rec_metrics.reset()

    def get_required_inputs(self) -> list[str] | None:
        """Returns the other model outputs that metrics need besides labels, predictions and weights; None if none."""
        return self.rec_metrics.get_required_inputs()

    def shutdown(self) -> None:
        """Does nothing; metrics use no threads."""

    def async_compute(self) -> MetricsResult:
        """Not supported; use `compute`."""
        raise RecMetricException("asynchronous computation is not supported: use compute()")

    def _adjust_interval(self) -> None:
        """Adjusts the interval to its bounds, once, at the second computation."""
        now, previous = time.monotonic(), self._computed_at
        self._computed_at = now
        lower, upper = self._bounds_s
        if previous is None or self._bounds_s == (0.0, float("inf")):
            return
        interval = now - previous
        self._bounds_s = (0.0, float("inf"))
        steps = self.compute_interval_steps
        if not lower <= interval <= upper and interval > 0:
            if upper == float("inf"):
                target = lower + 1.0
            elif lower == 0.0:
                target = upper - (1.0 if upper > 1.0 else 0.0)
            else:
                target = (lower + upper) / 2
            steps = max(1, int(target * steps / interval))
        group = group_of(self.rec_metrics[0]._group)
        self.compute_interval_steps = max(all_gather_object(steps, group)) if group else steps


def generate_metric_module(
    metric_class: type[RecMetricModule],
    metrics_config: MetricsConfig,
    batch_size: int,
    world_size: int,
    my_rank: int,
    state_metrics_mapping: dict[StateMetricEnum, StateMetric],
    device: torch.device,
    process_group: dist.ProcessGroup | None = None,
    batch_size_stages: Sequence[BatchSizeStage] | None = None,
    module_kwargs: dict[str, Any] | None = None,
) -> RecMetricModule:
    """Creates the metric module of a config.

    Args:
        metric_class: `RecMetricModule` or a subclass.
        metrics_config: the config.
        batch_size: examples per rank and batch.
        world_size, my_rank: number of ranks, and this rank.
        state_metrics_mapping: the components that the config names in `state_metrics`.
        device: device of the state; use the device of the model's outputs to avoid copies.
        process_group: the ranks; default: all.
        batch_size_stages: batch sizes by iteration.
        module_kwargs: other arguments of `metric_class`.

    Raises:
        ValueError: a metric has neither tasks nor indices, or both; or the last stage has an end.
        RecMetricException: a metric that is not supported; the message names an alternative.
    """
    validate_batch_size_stages(batch_size_stages)
    config = metrics_config
    metrics = [
        _class_of(metric)(
            world_size=world_size,
            my_rank=my_rank,
            batch_size=batch_size,
            tasks=_tasks_of(metric, definition, config),
            compute_mode=config.rec_compute_mode,
            window_size=definition.window_size,
            fused_update_limit=config.fused_update_limit,
            compute_on_all_ranks=config.compute_on_all_ranks,
            should_validate_update=config.should_validate_update,
            process_group=process_group,
            **(definition.arguments or {}),
        )
        for metric, definition in config.rec_metrics.items()
    ]
    throughput = None
    if config.throughput_metric is not None:
        throughput = ThroughputMetric(
            batch_size=batch_size,
            world_size=world_size,
            window_seconds=config.throughput_metric.window_size,
            warmup_steps=config.throughput_metric.warmup_steps,
            batch_size_stages=batch_size_stages,
        )
    module = metric_class(
        batch_size=batch_size,
        world_size=world_size,
        rec_tasks=config.rec_tasks,
        rec_metrics=RecMetricList(metrics),
        throughput_metric=throughput,
        state_metrics={
            compose_metric_namespace(kind, str(kind)): state_metrics_mapping[kind] for kind in config.state_metrics
        },
        compute_interval_steps=config.compute_interval_steps,
        min_compute_interval=config.min_compute_interval,
        max_compute_interval=config.max_compute_interval,
        **(module_kwargs or {}),
    )
    return module.to(device)


def _class_of(metric: RecMetricEnum) -> type[RecMetric]:
    if metric not in REC_METRICS_MAPPING:
        instead = NOT_OFFERED.get(metric, f"one of {sorted(str(kind) for kind in REC_METRICS_MAPPING)}")
        raise RecMetricException(f"the metric {metric} is not supported; use {instead}")
    return REC_METRICS_MAPPING[metric]


def _tasks_of(metric: RecMetricEnum, definition: RecMetricDef, config: MetricsConfig) -> list[RecTaskInfo]:
    if bool(definition.rec_tasks) == bool(definition.rec_task_indices):
        raise ValueError(f"the metric {metric} needs either rec_tasks or rec_task_indices")
    return definition.rec_tasks or [config.rec_tasks[index] for index in definition.rec_task_indices]
