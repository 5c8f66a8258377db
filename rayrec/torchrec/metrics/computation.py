"""`RecMetricComputation`: the base of a metric's sums and figures, to derive from for a metric of your own."""

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
from rayrec.torchrec.metrics.streaming.sums import Figure

if TYPE_CHECKING:
    import torch.distributed as dist

MAX_BUFFER_COUNT = 1000  # batches of a window
_OVER_RANKS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda values: values.mean(0),
    "max": lambda values: values.amax(0),
    "min": lambda values: values.amin(0),
}


@dataclass(frozen=True)
class MetricComputationReport:
    """A figure.

    Args:
        name: of the metric.
        metric_prefix: over which examples.
        value: [T].
        description: follows the name.
    """

    name: object
    metric_prefix: MetricPrefix
    value: torch.Tensor
    description: str | None = None


class WindowBuffer:
    """The values that make up a window's sum.

    Args:
        max_size: examples in the window.
        max_buffer_count: values in it.
    """

    def __init__(self, max_size: int, max_buffer_count: int) -> None:
        self._max_size, self._max_count = max_size, max_buffer_count
        self._held: deque[tuple[int, torch.Tensor]] = deque()

    def aggregate_state(self, window_state: torch.Tensor, curr_state: torch.Tensor, size: int) -> None:
        """Adds a value of so many examples to `window_state`, and takes the oldest out until the window is full."""
        self._held.append((size, curr_state))
        window_state += curr_state
        while self._held and (len(self._held) > self._max_count or sum(n for n, _ in self._held) > self._max_size):
            window_state -= self._held.popleft()[1]

    @property
    def buffers(self) -> deque[torch.Tensor] | None:
        """The values; None if there are none."""
        return deque(value for _, value in self._held) or None


class RecMetricComputation(torch.nn.Module, ABC):
    """Sums over examples of T tasks, and figures of them.

    A metric of your own derives from it: `__init__` calls `_add_state` for each sum, `update` adds a batch to the
    attributes of these names and to their windows (`_aggregate_window_state`), `_compute` gives the figures. The class
    with `_computation_class` and `_namespace` is a `RecMetric`.

    Args:
        my_rank: this rank.
        batch_size: of a rank.
        n_tasks: T.
        window_size: examples of this rank in a window.
        compute_on_all_ranks, should_validate_update, compute_mode, process_group, fused_update_limit: those of the
            metric, which acts on them; for `_compute` to read.
        allow_missing_label_with_zero_weight: for `_compute` to read.
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
        """The window's sum of a state."""
        found: torch.Tensor = getattr(self, self.get_window_state_name(state_name))
        return found

    def _add_state(
        self,
        name: str,
        default: torch.Tensor,
        add_window_state: bool,
        dist_reduce_fx: str = "sum",
        persistent: bool = False,
    ) -> None:
        """Makes an attribute of this name.

        Args:
            name: of the state.
            default: its value before the first batch.
            add_window_state: there is a second one, of the window.
            dist_reduce_fx: how it is joined over ranks: "sum", "mean", "max" or "min".
            persistent: a `state_dict` holds it.

        Raises:
            ValueError: a state that is no tensor, or another way of joining.
        """
        if not isinstance(default, torch.Tensor):
            raise ValueError(f"state {name!r}: default is {default!r}; lists are not joined over ranks, use a tensor")
        if dist_reduce_fx != "sum" and dist_reduce_fx not in _OVER_RANKS:
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
        """Adds a batch's part of a state to its window."""
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
            kwargs: `required_inputs` by name, each [T, B], where the metric has some; and what is passed to the
                metric's `update`.
        """

    @abstractmethod
    def _compute(self) -> list[MetricComputationReport]:
        """The figures."""

    def pre_compute(self) -> None:
        """Called before the figures are computed."""

    def compute(self) -> list[MetricComputationReport]:
        """The figures of what the states hold."""
        self.pre_compute()
        return self._compute()

    local_compute = compute

    def add(self, examples: Examples, **kwargs: Any) -> None:
        """Adds a batch, as a metric has it."""
        if examples.inputs:
            kwargs["required_inputs"] = dict(examples.inputs)
        self.update(predictions=examples.predictions, labels=examples.labels_TB, weights=examples.weights_TB, **kwargs)

    def figures(self) -> list[Figure]:
        return [
            (str(report.metric_prefix), f"{report.name}{report.description or ''}", report.value)
            for report in self.compute()
        ]

    def reset(self) -> None:
        """Forgets every batch."""
        for name, default in self._defaults.items():
            getattr(self, name).copy_(default)
        self._batch_window_buffers = {name: self._window() for name in self._batch_window_buffers}

    def _of(self, summed: bool) -> list[str]:
        return [name for name, how in self._reductions.items() if (how == "sum") is summed]

    def flat(self) -> torch.Tensor:
        """State that is summed over ranks."""
        empty = torch.zeros(0, dtype=torch.float64)
        return torch.cat([empty, *(getattr(self, name).double().flatten().cpu() for name in self._of(summed=True))])

    def kept(self) -> Any:
        """State that is joined over ranks in other ways; None if there is none."""
        return {name: getattr(self, name).clone() for name in self._of(summed=False)} or None

    def take(self, flat: torch.Tensor, kept: Sequence[Any]) -> None:
        """Makes the states those of `flat` and of several `kept`."""
        names = self._of(summed=True)
        for name, part in zip(names, flat.split([getattr(self, name).numel() for name in names]), strict=True):
            getattr(self, name).copy_(part.view_as(getattr(self, name)))
        for name in self._of(summed=False):
            of_ranks = torch.stack([of_rank[name] for of_rank in kept])
            getattr(self, name).copy_(_OVER_RANKS[self._reductions[name]](of_ranks))


class MeasuredComputation(RecMetricComputation):
    """A computation of one of the package's own metrics, to derive from; states have the names of its sums.

    Args:
        args, kwargs: as of `RecMetricComputation`, and the metric's own options.

    Raises:
        TypeError: an option that the metric does not have.
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
            own: torch.Tensor = getattr(self, name)
            own.copy_(value) if self.measure.last_only else own.add_(value)
            self._aggregate_window_state(name, value, examples.count)

    def _compute(self) -> list[MetricComputationReport]:
        of_run = {name: getattr(self, name) for name in self.measure.sums}
        of_window = {name: self.get_window_state(name) for name in self.measure.sums}
        reports = [
            MetricComputationReport(name, prefix, value)
            for prefix, sums in ((MetricPrefix.LIFETIME, of_run), (MetricPrefix.WINDOW, of_window))
            for name, value in self.measure.figures(sums, self._options).items()
        ]
        totals = self.measure.totals(of_run) if self.measure.totals else {}
        return reports + [MetricComputationReport(name, MetricPrefix.DEFAULT, value) for name, value in totals.items()]
