"""`RecMetric`, one metric of several tasks, and `RecMetricList`, several metrics, under TorchRec's names.

The metrics are defined in `rayrec.torchrec.metrics.streaming`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, cast

import torch

from rayrec.distributed.comm import all_gather_object, all_reduce
from rayrec.torchrec.metrics.computation import (
    MAX_BUFFER_COUNT,
    MetricComputationReport,
    RecMetricComputation,
    WindowBuffer,
)
from rayrec.torchrec.metrics.metrics_config import RecComputeMode, RecTaskInfo
from rayrec.torchrec.metrics.streaming.errors import ERRORS
from rayrec.torchrec.metrics.streaming.measure import REQUIRED, Examples
from rayrec.torchrec.metrics.streaming.rates import RATES
from rayrec.torchrec.metrics.streaming.samples import SAMPLE_OPTIONS, WindowSamples
from rayrec.torchrec.metrics.streaming.sessions import SESSIONS
from rayrec.torchrec.metrics.streaming.sums import Result, StreamedSums
from rayrec.torchrec.metrics.throughput import RATE_OPTIONS, TaskRate

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = [
    "MAX_BUFFER_COUNT",
    "MetricComputationReport",
    "RecMetric",
    "RecMetricComputation",
    "RecMetricException",
    "RecMetricList",
    "WindowBuffer",
]

MEASURES = RATES | ERRORS | SESSIONS
NAMESPACES = {"tensor_weighted_avg": "weighted_avg", "tower_qps": "qps"}  # the namespace of other metrics is their name
Outputs = torch.Tensor | Mapping[str, torch.Tensor]
Computation = StreamedSums | WindowSamples | TaskRate | RecMetricComputation


class RecMetricException(Exception):
    """Unsupported use or configuration of a metric."""


class RecMetric(torch.nn.Module):
    """One metric. Use a subclass for a metric (`NEMetric`, …), or derive one of your own, with `_namespace` and with
    `_computation_class`, a `RecMetricComputation`.

    Args:
        world_size: number of ranks that share a window.
        my_rank: this rank.
        batch_size: examples per rank and batch; at most this rank's share of the window.
        tasks: the tasks, described by names of model outputs.
        compute_mode: whether one tensor holds the sums of all tasks.
        window_size: examples in a window, over all ranks.
        fused_update_limit: process this number of batches at a time.
        compute_on_all_ranks: return metrics on all ranks instead of rank 0 only.
        should_validate_update: skip batches with zero total weight; metrics are 0 until the first other batch.
        process_group: the ranks; default: all.
        options: options of the metric.

    Raises:
        ValueError: the window is smaller than a batch, or both tasks and updates are fused.
        TypeError: an unknown or a missing option.
    """

    name = ""
    _namespace: ClassVar[object | None] = None
    _computation_class: ClassVar[type[RecMetricComputation] | None] = None

    def __init__(
        self,
        world_size: int,
        my_rank: int,
        batch_size: int,
        tasks: list[RecTaskInfo],
        compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        window_size: int = 100,
        fused_update_limit: int = 0,
        compute_on_all_ranks: bool = False,
        should_validate_update: bool = False,
        process_group: dist.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self._fused = compute_mode is not RecComputeMode.UNFUSED_TASKS_COMPUTATION
        if self._fused and fused_update_limit > 0:
            raise ValueError("fused tasks (compute_mode) and fused updates (fused_update_limit) exclude each other")
        window = math.ceil(window_size / world_size)
        if window < batch_size:
            raise ValueError(f"window of {window} examples per rank is smaller than a batch of {batch_size}")
        self._tasks, self._group = tasks, process_group
        self._reports = my_rank == 0 or compute_on_all_ranks
        self._update_limit, self._pending = fused_update_limit, list[tuple[Any, ...]]()
        self._validate = should_validate_update
        for ignored in ("enable_pt2_compile", "should_clone_update_inputs", "batch_size_stages"):
            options.pop(ignored, None)
        groups = self._groups()
        computations: list[Computation]
        if self._computation_class is not None:
            settings: dict[str, Any] = {
                "my_rank": my_rank,
                "batch_size": batch_size,
                "window_size": window,
                "compute_on_all_ranks": compute_on_all_ranks,
                "should_validate_update": should_validate_update,
                "compute_mode": compute_mode,
                "process_group": process_group,
                "fused_update_limit": fused_update_limit,
            }
            computations = [self._computation_class(n_tasks=len(group), **settings, **options) for group in groups]
            self._required_inputs: set[str] = set()
        else:
            computations = [self._computation(group, options, window) for group in groups]
            self._required_inputs = set().union(*(self._inputs(group, options) for group in groups))
        self._metrics_computations = torch.nn.ModuleList(computations)
        if should_validate_update:
            for group, computation in zip(groups, self._metrics_computations, strict=True):
                computation.register_buffer("has_valid_update", torch.zeros(len(group), dtype=torch.uint8))
        self._rank_state: list[tuple[torch.Tensor, Any, torch.Tensor | None]] = []  # this rank's state, while synced

    def _groups(self) -> list[list[RecTaskInfo]]:
        """Returns the tasks of each computation."""
        return [self._tasks] if self._fused else [[task] for task in self._tasks]

    def _computations(self) -> list[Computation]:
        return [cast(Computation, computation) for computation in self._metrics_computations]

    @property
    def namespace(self) -> str:
        return NAMESPACES.get(self.name, self.name) if self._namespace is None else str(self._namespace)

    def _all_options(self, tasks: Sequence[RecTaskInfo], options: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the options with defaults filled in."""
        measure = MEASURES.get(self.name)
        defaults = dict(measure.options if measure else {**SAMPLE_OPTIONS, **RATE_OPTIONS}[self.name])
        names = set(defaults) - {"tasks"}
        if unknown := set(options) - names:
            raise TypeError(f"{type(self).__name__} has no option {sorted(unknown)}; it has {sorted(names)}")
        all_options = defaults | dict(options) | ({"tasks": tasks} if "tasks" in defaults else {})
        if missing := [name for name, value in all_options.items() if value is REQUIRED]:
            raise TypeError(f"{type(self).__name__} needs {missing}")
        return all_options

    def _computation(self, tasks: Sequence[RecTaskInfo], options: Mapping[str, Any], window: int) -> Computation:
        all_options = self._all_options(tasks, options)
        if self.name in RATE_OPTIONS:
            return TaskRate(all_options, len(tasks), window)
        if self.name in SAMPLE_OPTIONS:
            return WindowSamples(self.name, all_options, len(tasks), window)
        return StreamedSums(MEASURES[self.name], all_options, len(tasks), window)

    def _inputs(self, tasks: Sequence[RecTaskInfo], options: Mapping[str, Any]) -> set[str]:
        all_options = self._all_options(tasks, options)
        if self.name in MEASURES:
            return MEASURES[self.name].inputs(all_options)
        return {"grouping_keys"} if all_options.get(f"grouped_{self.name}") else set()

    def get_required_inputs(self) -> set[str]:
        """Returns the names of the other model outputs it needs besides labels, predictions and weights."""
        return self._required_inputs

    def update(
        self,
        *,
        predictions: Outputs,
        labels: Outputs,
        weights: Outputs | None,
        required_inputs: Mapping[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        """Adds a batch.

        Args:
            predictions: probabilities [B] by task, or one tensor [T, B]; [B, C] for a task with C classes.
            labels, weights: the same shapes; weights are 1 by default.
            required_inputs: the outputs that `get_required_inputs` names, each [B].
            kwargs: passed to a custom computation; built-in metrics ignore them.
        """
        self._pending.append((predictions, labels, weights, required_inputs or {}, kwargs))
        if len(self._pending) >= max(1, self._update_limit):
            self._add_pending()

    @torch.no_grad()
    def _add_pending(self) -> None:
        if not self._pending:
            return
        *outputs, kwargs = [_joined(list(batches)) for batches in zip(*self._pending, strict=True)]
        self._pending.clear()
        for tasks, computation in zip(self._groups(), self._computations(), strict=True):
            examples = self._examples(tasks, *outputs)
            if examples is None:
                continue
            if self._validate:
                valid_T = examples.weights_TB.count_nonzero(-1) > 0
                if not valid_T.any():
                    continue
                _valid(computation).logical_or_(valid_T)
            if isinstance(computation, RecMetricComputation):
                computation.add(examples, **kwargs)
            else:
                computation.add(examples)

    def _examples(
        self,
        tasks: Sequence[RecTaskInfo],
        predictions: Outputs,
        labels: Outputs,
        weights: Outputs | None,
        inputs: Mapping[str, torch.Tensor],
    ) -> Examples | None:
        """Returns the batch of the tasks; None if the model has no output for a task, or the batch is empty."""

        def stacked(outputs: Outputs) -> torch.Tensor:
            if isinstance(outputs, torch.Tensor):
                return outputs if self._fused else outputs[self._tasks.index(tasks[0])][None]
            return torch.stack([outputs[task.name] for task in tasks])

        if not self._fused and not isinstance(predictions, torch.Tensor) and tasks[0].name not in predictions:
            return None
        scores, labels_TB = stacked(predictions), stacked(labels).double()
        if not labels_TB.numel():
            return None
        rows = len(tasks)
        if scores.dim() == labels_TB.dim():
            scores = scores.reshape(rows, -1)
        labels_TB = labels_TB.reshape(rows, -1)
        weights_TB = torch.ones_like(labels_TB) if weights is None else stacked(weights).double().reshape(rows, -1)
        missing = self._required_inputs - set(inputs)
        if missing:
            raise RecMetricException(f"{self.namespace} needs {sorted(missing)} among the required_inputs")
        expanded = {name: inputs[name].reshape(1, -1).expand(labels_TB.shape) for name in self._required_inputs}
        return Examples(predictions=scores.double(), labels_TB=labels_TB, weights_TB=weights_TB, inputs=expanded)

    def compute(self) -> dict[str, torch.Tensor]:
        """Returns the metric over all ranks. Collective. By default, only rank 0 gets the result."""
        return RecMetricList([self]).compute()

    def local_compute(self) -> dict[str, torch.Tensor]:
        """Returns the metric of this rank only."""
        return self.report("local_")

    def report(self, scope: str = "") -> dict[str, torch.Tensor]:
        """Returns the results of the current state by key, each [1], or a scalar if tasks are fused."""
        self._add_pending()
        report: dict[str, torch.Tensor] = {}
        for index, computation in enumerate(self._computations()):
            for result in computation.results():
                report |= self._by_key(scope, index, result)
        return report

    def _by_key(self, scope: str, index: int, result: Result) -> dict[str, torch.Tensor]:
        prefix, name, value_T = result
        value_T = value_T.detach().clone()
        if self._validate:
            value_T[_valid(self._metrics_computations[index]) == 0] = 0
        tasks = enumerate(self._tasks) if self._fused else [(slice(None), self._tasks[index])]
        return {f"{self.namespace}-{task.name}|{scope}{prefix}{name}": value_T[row] for row, task in tasks}

    def sync(self) -> None:
        """Replaces its state by the sum over ranks, until `unsync`. Collective."""
        RecMetricList([self]).sync()

    def unsync(self) -> None:
        """Restores the state of this rank."""
        for computation, (summed, gathered, valid) in zip(self._computations(), self._rank_state, strict=False):
            computation.load_state(summed, [gathered])
            if valid is not None:
                _valid(computation).copy_(valid)
        self._rank_state = []

    def reset(self) -> None:
        """Resets the state."""
        self._pending.clear()
        for computation in self._computations():
            computation.reset()
            if self._validate:
                _valid(computation).zero_()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the `state_dict` of `torch.nn.Module`, after adding pending batches."""
        self._add_pending()
        return super().state_dict(*args, **kwargs)


def _valid(computation: torch.nn.Module) -> torch.Tensor:
    """Returns uint8 [T]: whether each task had an update with nonzero weight."""
    return cast(torch.Tensor, computation.has_valid_update)


def _joined(batches: list[Any]) -> Any:
    """Concatenates batches; for each task, those in which the model has an output."""
    if len(batches) == 1 or batches[0] is None:
        return batches[0]
    if isinstance(batches[0], torch.Tensor):
        return torch.cat(batches)
    names = dict.fromkeys(name for batch in batches for name in batch)
    return {name: torch.cat([batch[name] for batch in batches if name in batch]) for name in names}


class RecMetricList(torch.nn.Module):
    """Several metrics; one collective reduces the sums of all over ranks.

    Args:
        rec_metrics: the metrics.
    """

    def __init__(self, rec_metrics: Sequence[RecMetric]) -> None:
        super().__init__()
        self.rec_metrics = torch.nn.ModuleList(rec_metrics)

    def __len__(self) -> int:
        return len(self.rec_metrics)

    def __iter__(self) -> Iterator[RecMetric]:
        return iter(cast(list[RecMetric], list(self.rec_metrics)))

    def __getitem__(self, index: int) -> RecMetric:
        return cast(RecMetric, self.rec_metrics[index])

    def get_required_inputs(self) -> list[str] | None:
        """Returns the other model outputs that metrics need besides labels, predictions and weights; None if none."""
        return sorted(set().union(*(metric.get_required_inputs() for metric in self))) or None

    def update(self, **outputs: Any) -> None:
        """Adds a batch to each metric; see `RecMetric.update`."""
        for metric in self:
            metric.update(**outputs)

    def compute(self) -> dict[str, torch.Tensor]:
        """See `RecMetric.compute`."""
        report: dict[str, torch.Tensor] = {}
        with self._synced():
            for metric in self:
                report |= metric.report() if metric._reports else {}
        return report

    def local_compute(self) -> dict[str, torch.Tensor]:
        """Returns the metrics of this rank only."""
        return {key: value for metric in self for key, value in metric.local_compute().items()}

    @contextmanager
    def _synced(self) -> Iterator[None]:
        is_synced = any(bool(metric._rank_state) for metric in self)
        if not is_synced:
            self.sync()
        try:
            yield
        finally:
            if not is_synced:
                self.unsync()

    def sync(self) -> None:
        """Replaces the state by the sum over ranks, until `unsync`. Collective."""
        if not len(self) or (group := group_of(self[0]._group)) is None:
            return
        states = []
        for metric in self:
            metric._add_pending()
            for computation in metric._computations():
                valid = _valid(computation).clone() if metric._validate else None
                metric._rank_state.append((computation.summed_state(), computation.gathered_state(), valid))
            states += metric._rank_state
        buffers = [torch.cat([state, *([valid.to(state)] if valid is not None else [])]) for state, _, valid in states]
        totals = all_reduce(torch.cat(buffers), group).split([len(buffer) for buffer in buffers])
        gathered_here = [gathered for _, gathered, _ in states]
        has_gathered = any(gathered is not None for gathered in gathered_here)
        by_rank = all_gather_object(gathered_here, group) if has_gathered else []
        computations = [computation for metric in self for computation in metric._computations()]
        for index, (computation, (state, _, valid), total) in enumerate(zip(computations, states, totals, strict=True)):
            computation.load_state(total[: len(state)], [gathered[index] for gathered in by_rank])
            if valid is not None:
                _valid(computation).copy_(total[len(state) :] > 0)

    def unsync(self) -> None:
        """Restores the state of this rank."""
        for metric in self:
            metric.unsync()

    def reset(self) -> None:
        """Resets the state of all metrics."""
        for metric in self:
            metric.reset()


def group_of(group: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """Returns the group to reduce over, by default all ranks; None for a single rank."""
    import torch.distributed as dist

    if group is None and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    return group if group is not None and group.size() > 1 else None
