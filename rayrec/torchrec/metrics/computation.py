"""`RecMetricComputation`, the base class of the state and the values of a metric, for metrics of your own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from rayrec.torchrec.metrics.metrics_config import RecComputeMode
from rayrec.torchrec.metrics.metrics_namespace import MetricPrefix
from rayrec.torchrec.metrics.streaming.measure import Examples, Measure
from rayrec.torchrec.metrics.streaming.sums import Result

if TYPE_CHECKING:
    import torch.distributed as dist

MAX_BUFFER_COUNT = 1000  # batches in a window
_RANK_REDUCTIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda values: values.mean(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}


@dataclass(frozen=True)
class MetricComputationReport:
    """The value of a metric.

    Args:
        name: name of the metric.
        metric_prefix: the examples that it covers.
        value: [T].
        description: suffix of the name.
    """

    name: object
    metric_prefix: MetricPrefix
    value: torch.Tensor
    description: str | None = None


class WindowBuffer:
    """The addends of the sum over a window.

    Args:
        max_size: most examples in the window.
        max_buffer_count: most addends in the window.
    """

    def __init__(self, max_size: int, max_buffer_count: int) -> None:
        self._max_size, self._max_count = max_size, max_buffer_count
        self._addends: deque[tuple[int, torch.Tensor]] = deque()

    def aggregate_state(self, window_state: torch.Tensor, curr_state: torch.Tensor, size: int) -> None:
        """Adds the value of `size` examples to `window_state`, and subtracts the oldest values beyond the window."""
        self._addends.append((size, curr_state))
        window_state += curr_state
        while self._addends and (len(self._addends) > self._max_count or self._num_examples() > self._max_size):
            window_state -= self._addends.popleft()[1]

    def _num_examples(self) -> int:
        return sum(size for size, _ in self._addends)

    @property
    def buffers(self) -> deque[torch.Tensor] | None:
        """The addends; None if the window is empty."""
        return deque(value for _, value in self._addends) or None


class RecMetricComputation(torch.nn.Module, ABC):
    """The state of a metric for T tasks, and its values.

    For a metric of your own, derive from this class: call `_add_state` in `__init__` for each sum, add a batch to these
    attributes and their windows (`_aggregate_window_state`) in `update`, and return the values from `_compute`. Then
    set `_computation_class` and `_namespace` in a subclass of `RecMetric`.

    Args:
        my_rank: this rank.
        batch_size: examples per rank and batch.
        n_tasks: T.
        window_size: examples of this rank in a window.
        compute_on_all_ranks, should_validate_update, compute_mode, process_group, fused_update_limit: settings of the
            metric, which `_compute` may read.
        allow_missing_label_with_zero_weight: a setting that `_compute` may read.
    """

    def __init__(
        self,
        my_rank: int,
        batch_size: int,
        n_tasks: int,
        window_size: int,
        compute_on_all_ranks: bool = False,
        should_validate_update: bool = False,
        compute_mode: RecComputeMode = RecComputeMode.UNFUSED_TASKS_COMPUTATION,
        process_group: dist.ProcessGroup | None = None,
        fused_update_limit: int = 0,
        allow_missing_label_with_zero_weight: bool = False,
    ) -> None:
        super().__init__()
        self._my_rank, self._batch_size, self._n_tasks, self._window_size = my_rank, batch_size, n_tasks, window_size
        self._compute_on_all_ranks, self._should_validate_update = compute_on_all_ranks, should_validate_update
        self._compute_mode, self._process_group, self._fused_update_limit = (
            compute_mode,
            process_group,
            fused_update_limit,
        )
        self._allow_missing_label_with_zero_weight = allow_missing_label_with_zero_weight
        self._defaults: dict[str, torch.Tensor] = {}
        self._reductions: dict[str, str] = {}
        self._batch_window_buffers: dict[str, WindowBuffer] = {}

    @staticmethod
    def get_window_state_name(state_name: str) -> str:
        return f"window_{state_name}"

    def get_window_state(self, state_name: str) -> torch.Tensor:
        """Returns the sum of a state over the window."""
        state: torch.Tensor = getattr(self, self.get_window_state_name(state_name))
        return state

    def _add_state(
        self,
        name: str,
        default: torch.Tensor,
        add_window_state: bool,
        dist_reduce_fx: str = "sum",
        persistent: bool = False,
    ) -> None:
        """Creates the attribute of a state.

        Args:
            name: name of the state.
            default: its value before the first batch.
            add_window_state: also create a state of the window.
            dist_reduce_fx: reduction over ranks: "sum", "mean", "max" or "min".
            persistent: save it in the `state_dict`.

        Raises:
            ValueError: the default is not a tensor, or an unknown reduction.
        """
        if not isinstance(default, torch.Tensor):
            raise ValueError(f"state {name!r}: default={default!r} must be a tensor; ranks cannot reduce lists")
        if dist_reduce_fx != "sum" and dist_reduce_fx not in _RANK_REDUCTIONS:
            raise ValueError(f"state {name!r}: dist_reduce_fx={dist_reduce_fx!r} must be sum, mean, max or min")
        self._state(name, default, dist_reduce_fx, persistent)
        if add_window_state:
            self._state(self.get_window_state_name(name), default, dist_reduce_fx, False)
            self._batch_window_buffers[self.get_window_state_name(name)] = self._window()

    def _state(self, name: str, default: torch.Tensor, reduction: str, persistent: bool) -> None:
        self._defaults[name], self._reductions[name] = default.detach().clone(), reduction
        self.register_buffer(name, default.detach().clone(), persistent=persistent)

    def _window(self) -> WindowBuffer:
        return WindowBuffer(self._window_size, MAX_BUFFER_COUNT)

    def _aggregate_window_state(self, state_name: str, state: torch.Tensor, num_samples: int) -> None:
        """Adds the value of a batch to the window of a state."""
        buffer = self._batch_window_buffers[self.get_window_state_name(state_name)]
        buffer.aggregate_state(self.get_window_state(state_name), state, num_samples)

    @abstractmethod
    def update(
        self,
        *,
        predictions: torch.Tensor | None,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
        **kwargs: Any,
    ) -> None:
        """Adds a batch.

        Args:
            predictions, labels, weights: [T, B].
            kwargs: `required_inputs` by name, each [T, B], if the metric has some; and the other arguments of the
                metric's `update`.
        """

    @abstractmethod
    def _compute(self) -> list[MetricComputationReport]:
        """Returns the values."""

    def pre_compute(self) -> None:
        """Called before `_compute`."""

    def compute(self) -> list[MetricComputationReport]:
        """Returns the values of the current state."""
        self.pre_compute()
        return self._compute()

    local_compute = compute

    def add(self, examples: Examples, **kwargs: Any) -> None:
        """Passes a batch to `update`."""
        if examples.inputs:
            kwargs["required_inputs"] = dict(examples.inputs)
        self.update(predictions=examples.predictions, labels=examples.labels_TB, weights=examples.weights_TB, **kwargs)

    def results(self) -> list[Result]:
        return [
            (str(report.metric_prefix), f"{report.name}{report.description or ''}", report.value)
            for report in self.compute()
        ]

    def reset(self) -> None:
        """Resets all states to their defaults."""
        for name, default in self._defaults.items():
            getattr(self, name).copy_(default)
        self._batch_window_buffers = {name: self._window() for name in self._batch_window_buffers}

    def _state_names(self, summed: bool) -> list[str]:
        return [name for name, reduction in self._reductions.items() if (reduction == "sum") is summed]

    def summed_state(self) -> torch.Tensor:
        """Returns the states that are summed over ranks, flat."""
        states = [getattr(self, name).double().flatten().cpu() for name in self._state_names(summed=True)]
        return torch.cat([torch.zeros(0, dtype=torch.float64), *states])

    def gathered_state(self) -> Any:
        """Returns the states with other reductions; None without any."""
        return {name: getattr(self, name).clone() for name in self._state_names(summed=False)} or None

    def load_state(self, summed: torch.Tensor, gathered: Sequence[Any]) -> None:
        """Sets the states from the sum of `summed_state`, and the `gathered_state` of all ranks."""
        names = self._state_names(summed=True)
        sizes = [getattr(self, name).numel() for name in names]
        for name, values in zip(names, summed.split(sizes), strict=True):
            getattr(self, name).copy_(values.view_as(getattr(self, name)))
        for name in self._state_names(summed=False):
            by_rank = torch.stack([states[name] for states in gathered])
            getattr(self, name).copy_(_RANK_REDUCTIONS[self._reductions[name]](by_rank))


class MeasuredComputation(RecMetricComputation):
    """The computation of a built-in metric, to derive from. Its states have the names of the sums.

    Args:
        args, kwargs: see `RecMetricComputation`; and the options of the metric.

    Raises:
        TypeError: an unknown option.
    """

    measure: ClassVar[Measure]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in self.measure.options if name in kwargs}
        super().__init__(*args, **kwargs)
        self._options = {**self.measure.options, **options}
        zeros = torch.zeros(self._n_tasks, *self.measure.shape(self._options), dtype=torch.float64)
        for name in self.measure.sums:
            self._add_state(name, zeros, add_window_state=True, persistent=not self.measure.last_only)

    @torch.no_grad()
    def update(
        self,
        *,
        predictions: torch.Tensor | None,
        labels: torch.Tensor,
        weights: torch.Tensor | None,
        required_inputs: Mapping[str, torch.Tensor] | None = None,
        **kwargs: Any,
    ) -> None:
        if predictions is None:
            raise ValueError(f"{type(self).__name__} needs predictions")
        examples = Examples(
            predictions=predictions.double(),
            labels_TB=labels.double(),
            weights_TB=torch.ones_like(labels, dtype=torch.float64) if weights is None else weights.double(),
            inputs=required_inputs or {},
        )
        for name, value in self.measure.of_batch(examples, self._options).items():
            state: torch.Tensor = getattr(self, name)
            state.copy_(value) if self.measure.last_only else state.add_(value)
            self._aggregate_window_state(name, value, examples.count)

    def _compute(self) -> list[MetricComputationReport]:
        lifetime_sums = {name: getattr(self, name) for name in self.measure.sums}
        window_sums = {name: self.get_window_state(name) for name in self.measure.sums}
        reports = [
            MetricComputationReport(name, prefix, value)
            for prefix, sums in ((MetricPrefix.LIFETIME, lifetime_sums), (MetricPrefix.WINDOW, window_sums))
            for name, value in self.measure.results(sums, self._options).items()
        ]
        totals = self.measure.totals(lifetime_sums) if self.measure.totals else {}
        return reports + [MetricComputationReport(name, MetricPrefix.DEFAULT, value) for name, value in totals.items()]
