"""`LabelMetrics`: the metrics of a model whose labels are binary, numbers, or some of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rayrec.metrics.binary import BinaryMetrics
from rayrec.metrics.histogram import LogitBins
from rayrec.metrics.numbers import NumberMetrics

if TYPE_CHECKING:
    import torch.distributed as dist

Part = BinaryMetrics | NumberMetrics


class LabelMetrics:
    """`BinaryMetrics` of the binary labels and `NumberMetrics` of the numbers, with the same interface.

    Args:
        kinds: "binary" or "number" for each label.
        device: where the state lives.
        names: of several labels; None for one.
        bins: as for `BinaryMetrics`.
    """

    def __init__(
        self,
        kinds: Sequence[str],
        device: torch.device | str | None = None,
        names: Sequence[str] | None = None,
        bins: LogitBins | None = None,
    ) -> None:
        self._names = names
        self._parts: list[tuple[list[int], Part]] = []
        for kind in dict.fromkeys(kinds):
            own = [place for place, one in enumerate(kinds) if one == kind]
            called = None if names is None else [names[place] for place in own]
            part = NumberMetrics(device, called) if kind == "number" else BinaryMetrics(device, bins, called)
            self._parts.append((own, part))

    def update(self, logits: torch.Tensor, labels: torch.Tensor, weights_B: torch.Tensor | None = None) -> None:
        """Adds a batch; never waits for the device.

        Args:
            logits: [B], or [B, T]: logits of binary labels, predictions of numbers.
            labels: of the same shape, NaN where a label was not observed.
            weights_B: None: all 1.
        """
        if len(self._parts) == 1:
            self._parts[0][1].update(logits, labels, weights_B)
            return
        for own, part in self._parts:
            part.update(logits[:, own], labels[:, own], weights_B)

    def compute(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """The figures of all that was added; `tasks` by name, for several labels, the first of which stands above. With
        a `group`, those of all its ranks (a collective)."""
        found = [part.compute(group) for _, part in self._parts]
        if self._names is None:
            return found[0]
        by_name = {name: figures for of_kind in found for name, figures in of_kind["tasks"].items()}
        tasks = {name: by_name[name] for name in self._names}
        return {**tasks[self._names[0]], "tasks": tasks}

    def reset(self) -> None:
        """Forgets every batch."""
        for _, part in self._parts:
            part.reset()

    def state(self, group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
        """A copy of the state, on the CPU; with a `group`, the sum over its ranks (a collective)."""
        return {name: value for _, part in self._parts for name, value in part.state(group).items()}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces the state by one that `state` gave.

        Raises:
            ValueError: it is not such a state.
        """
        numbers = {name: value for name, value in state.items() if name == "numbers"}
        rest = {name: value for name, value in state.items() if name != "numbers"}
        for _, part in self._parts:
            part.load_state(numbers if isinstance(part, NumberMetrics) else rest)
