"""`RecMetric`: one metric of some tasks, and `RecMetricList`: several, under TorchRec's names. The definitions of the
metrics are in `rayrec.torchrec.metrics.streaming`."""

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
from rayrec.torchrec.metrics.streaming.sums import Figure, StreamedSums
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
NAMESPACES = {"tensor_weighted_avg": "weighted_avg", "tower_qps": "qps"}  # the others report under their own names
Outputs = torch.Tensor | Mapping[str, torch.Tensor]
Computation = StreamedSums | WindowSamples | TaskRate | RecMetricComputation


class RecMetricException(Exception):
    """A metric is used or configured in a way that it does not support."""


class RecMetric(torch.nn.Module):
    """One metric. Use a subclass that has a name (`NEMetric`, …), or one of your own, which has `_namespace` and
    `_computation_class`, a `RecMetricComputation`.

    Args:
        world_size: ranks that share a window.
        my_rank: this one.
        batch_size: of a rank; at most its part of the window.
        tasks: names of outputs.
        compute_mode: whether the tasks' sums lie in one tensor.
        window_size: examples in a window, over all ranks.
        fused_update_limit: add so many batches at a time.
        compute_on_all_ranks: give figures on all ranks, not on rank 0 alone.
        should_validate_update: skip batches whose weights are all 0; the figures are 0 until there is another.
        process_group: the ranks; by default all.
        options: the metric's own.

    Raises:
        ValueError: a window smaller than a batch; fused tasks with fused updates.
        TypeError: an option that the metric does not have, or one that is missing.
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
            raise ValueError("tasks fused in one computation and fused updates do not go together; choose one")
        window = math.ceil(window_size / world_size)
        if window < batch_size:
            raise ValueError(f"a rank's window of {window} examples is smaller than a batch of {batch_size}")
        self._tasks, self._group = tasks, process_group
        self._reports = my_rank == 0 or compute_on_all_ranks
        self._update_limit, self._waiting = fused_update_limit, list[tuple[Any, ...]]()
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
            computations = [self._computation_class(n_tasks=len(of), **settings, **options) for of in groups]
            self._required_inputs: set[str] = set()
        else:
            computations = [self._computation(of, options, window) for of in groups]
            self._required_inputs = set().union(*(self._inputs(of, options) for of in groups))
        self._metrics_computations = torch.nn.ModuleList(computations)
        if should_validate_update:
            for of, computation in zip(groups, self._metrics_computations, strict=True):
                computation.register_buffer("has_valid_update", torch.zeros(len(of), dtype=torch.uint8))
        self._own: list[tuple[torch.Tensor, Any, torch.Tensor | None]] = []  # while synced: this rank's own state

    def _groups(self) -> list[list[RecTaskInfo]]:
        """The tasks of each computation."""
        return [self._tasks] if self._fused else [[task] for task in self._tasks]

    def _computations(self) -> list[Computation]:
        return [cast(Computation, computation) for computation in self._metrics_computations]

    @property
    def namespace(self) -> str:
        return NAMESPACES.get(self.name, self.name) if self._namespace is None else str(self._namespace)

    def _settled(self, tasks: Sequence[RecTaskInfo], options: Mapping[str, Any]) -> dict[str, Any]:
        """Its options, the defaults filled in."""
        measure = MEASURES.get(self.name)
        defaults = dict(measure.options if measure else {**SAMPLE_OPTIONS, **RATE_OPTIONS}[self.name])
        known = set(defaults) - {"tasks"}
        if unknown := set(options) - known:
            raise TypeError(f"{type(self).__name__} has no option {sorted(unknown)}; it has {sorted(known)}")
        settled = defaults | dict(options) | ({"tasks": tasks} if "tasks" in defaults else {})
        if missing := [name for name, value in settled.items() if value is REQUIRED]:
            raise TypeError(f"{type(self).__name__} needs {missing}")
        return settled

    def _computation(self, tasks: Sequence[RecTaskInfo], options: Mapping[str, Any], window: int) -> Computation:
        settled = self._settled(tasks, options)
        if self.name in RATE_OPTIONS:
            return TaskRate(settled, len(tasks), window)
        if self.name in SAMPLE_OPTIONS:
            return WindowSamples(self.name, settled, len(tasks), window)
        return StreamedSums(MEASURES[self.name], settled, len(tasks), window)

    def _inputs(self, tasks: Sequence[RecTaskInfo], options: Mapping[str, Any]) -> set[str]:
        settled = self._settled(tasks, options)
        if self.name in MEASURES:
            return MEASURES[self.name].inputs(settled)
        return {"grouping_keys"} if settled.get(f"grouped_{self.name}") else set()

    def get_required_inputs(self) -> set[str]:
        """Names of the model's outputs that it needs in addition to labels, predictions and weights."""
        return self._required_inputs

    def update(
        self,
        *,
        predictions: Outputs,
        labels: Outputs,
        weights: Outputs | None,
        required_inputs: Mapping[str, torch.Tensor] | None = None,
        **more: Any,
    ) -> None:
        """Adds a batch.

        Args:
            predictions: probabilities [B] by task, or one tensor [T, B]; of a task with classes [B, C].
            labels, weights: likewise; no weights: all 1.
            required_inputs: what `get_required_inputs` names, each [B].
            more: for a computation of your own; the package's metrics take nothing else.
        """
        self._waiting.append((predictions, labels, weights, required_inputs or {}, more))
        if len(self._waiting) >= max(1, self._update_limit):
            self._add_waiting()

    @torch.no_grad()
    def _add_waiting(self) -> None:
        if not self._waiting:
            return
        *whole, more = [_joined(list(parts)) for parts in zip(*self._waiting, strict=True)]
        self._waiting.clear()
        for tasks, computation in zip(self._groups(), self._computations(), strict=True):
            examples = self._examples(tasks, *whole)
            if examples is None:
                continue
            if self._validate:
                valid_T = examples.weights_TB.count_nonzero(-1) > 0
                if not valid_T.any():
                    continue
                _valid(computation).logical_or_(valid_T)
            if isinstance(computation, RecMetricComputation):
                computation.add(examples, **more)
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
        """None if the model has no output for the task."""

        def of(outputs: Outputs) -> torch.Tensor:
            if isinstance(outputs, torch.Tensor):
                return outputs if self._fused else outputs[self._tasks.index(tasks[0])][None]
            return torch.stack([outputs[task.name] for task in tasks])

        if not self._fused and not isinstance(predictions, torch.Tensor) and tasks[0].name not in predictions:
            return None
        scores, labels_TB = of(predictions), of(labels).double()
        if not labels_TB.numel():
            return None
        rows = len(tasks)
        if scores.dim() == labels_TB.dim():
            scores = scores.reshape(rows, -1)
        labels_TB = labels_TB.reshape(rows, -1)
        weights_TB = torch.ones_like(labels_TB) if weights is None else of(weights).double().reshape(rows, -1)
        missing = self._required_inputs - set(inputs)
        if missing:
            raise RecMetricException(f"{self.namespace} needs {sorted(missing)} among the required_inputs")
        shown = {name: inputs[name].reshape(1, -1).expand(labels_TB.shape) for name in self._required_inputs}
        return Examples(predictions=scores.double(), labels_TB=labels_TB, weights_TB=weights_TB, inputs=shown)

    def compute(self) -> dict[str, torch.Tensor]:
        """The figures over all ranks. Collective. The result is on rank 0 only, unless configured otherwise."""
        return RecMetricList([self]).compute()

    def local_compute(self) -> dict[str, torch.Tensor]:
        """The figures of this rank alone."""
        return self.report("local_")

    def report(self, scope: str = "") -> dict[str, torch.Tensor]:
        """The figures of what the computations hold, by key: each [1], or a scalar where tasks are fused."""
        self._add_waiting()
        found: dict[str, torch.Tensor] = {}
        for place, computation in enumerate(self._computations()):
            for figure in computation.figures():
                found |= self._named(scope, place, figure)
        return found

    def _named(self, scope: str, place: int, figure: Figure) -> dict[str, torch.Tensor]:
        prefix, name, value_T = figure
        value_T = value_T.detach().clone()
        if self._validate:
            value_T[_valid(self._metrics_computations[place]) == 0] = 0
        tasks = enumerate(self._tasks) if self._fused else [(slice(None), self._tasks[place])]
        return {f"{self.namespace}-{task.name}|{scope}{prefix}{name}": value_T[of] for of, task in tasks}

    def sync(self) -> None:
        """Replaces its state by the sum over ranks, until `unsync`. Collective."""
        RecMetricList([self]).sync()

    def unsync(self) -> None:
        """Restores this rank's own state."""
        for computation, (flat, kept, valid) in zip(self._computations(), self._own, strict=False):
            computation.take(flat, [kept])
            if valid is not None:
                _valid(computation).copy_(valid)
        self._own = []

    def reset(self) -> None:
        """Forgets every batch."""
        self._waiting.clear()
        for computation in self._computations():
            computation.reset()
            if self._validate:
                _valid(computation).zero_()

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Of the run's sums, as `torch.nn.Module`'s; batches that wait are added first."""
        self._add_waiting()
        return super().state_dict(*args, **kwargs)


def _valid(computation: torch.nn.Module) -> torch.Tensor:
    """uint8 [T]: which of its tasks had an update with a nonzero weight."""
    return cast(torch.Tensor, computation.has_valid_update)


def _joined(parts: list[Any]) -> Any:
    """Joins batches; for each task those in which the model has an output."""
    if len(parts) == 1 or parts[0] is None:
        return parts[0]
    if isinstance(parts[0], torch.Tensor):
        return torch.cat(parts)
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: torch.cat([part[name] for part in parts if name in part]) for name in names}


class RecMetricList(torch.nn.Module):
    """Several metrics, whose sums are reduced over ranks by one collective.

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

    def __getitem__(self, place: int) -> RecMetric:
        return cast(RecMetric, self.rec_metrics[place])

    def get_required_inputs(self) -> list[str] | None:
        """Outputs of the model that its metrics need in addition to labels, predictions and weights; None if none."""
        return sorted(set().union(*(metric.get_required_inputs() for metric in self))) or None

    def update(self, **outputs: Any) -> None:
        """Adds a batch to each; see `RecMetric.update`."""
        for metric in self:
            metric.update(**outputs)

    def compute(self) -> dict[str, torch.Tensor]:
        """See `RecMetric.compute`."""
        found: dict[str, torch.Tensor] = {}
        with self._synced():
            for metric in self:
                found |= metric.report() if metric._reports else {}
        return found

    def local_compute(self) -> dict[str, torch.Tensor]:
        """The figures of this rank alone."""
        return {key: value for metric in self for key, value in metric.local_compute().items()}

    @contextmanager
    def _synced(self) -> Iterator[None]:
        already = [bool(metric._own) for metric in self]
        if not any(already):
            self.sync()
        try:
            yield
        finally:
            if not any(already):
                self.unsync()

    def sync(self) -> None:
        """Replaces the state by the sum over ranks, until `unsync`. Collective."""
        if not len(self) or (group := group_of(self[0]._group)) is None:
            return
        parts = []
        for metric in self:
            metric._add_waiting()
            for computation in metric._computations():
                valid = _valid(computation).clone() if metric._validate else None
                metric._own.append((computation.flat(), computation.kept(), valid))
            parts += metric._own
        flats = [torch.cat([flat, *([valid.to(flat)] if valid is not None else [])]) for flat, _, valid in parts]
        summed = all_reduce(torch.cat(flats), group).split([len(flat) for flat in flats])
        kept_here = [kept for _, kept, _ in parts]
        kept = all_gather_object(kept_here, group) if any(one is not None for one in kept_here) else []
        place = 0
        for metric in self:
            for computation in metric._computations():
                flat, _, valid = parts[place]
                of_all = summed[place]
                computation.take(of_all[: len(flat)], [of_rank[place] for of_rank in kept])
                if valid is not None:
                    _valid(computation).copy_(of_all[len(flat) :] > 0)
                place += 1

    def unsync(self) -> None:
        """Restores this rank's own state."""
        for metric in self:
            metric.unsync()

    def reset(self) -> None:
        """Forgets every batch."""
        for metric in self:
            metric.reset()


def group_of(given: dist.ProcessGroup | None) -> dist.ProcessGroup | None:
    """The ranks to sum over; None for this rank only."""
    import torch.distributed as dist

    if given is None and dist.is_available() and dist.is_initialized():
        given = dist.group.WORLD
    return given if given is not None and given.size() > 1 else None
