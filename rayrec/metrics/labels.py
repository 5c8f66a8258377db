"""`LabelMetrics`: quality of predictions over any number of batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rayrec.distributed.comm import all_reduce
from rayrec.metrics.binary import BinarySums
from rayrec.metrics.histogram import LogitBins
from rayrec.metrics.numbers import NumberSums
from rayrec.metrics.reliability import reliability

if TYPE_CHECKING:
    import torch.distributed as dist


class LabelMetrics:
    """Metrics of binary labels (see `BinarySums`) and numbers (`NumberSums`), accumulated in bounded memory.

    With several labels, the top level has the metrics of the first label, and `tasks` has each label's by name. With
    weights, all sums except `samples` are weighted. A NaN label was not observed and does not count.

    Args:
        kinds: "binary" or "number" for each label. Default: all binary.
        device: Device of the state (1 MiB per binary label). The device of the logits avoids copies.
        names: Names of T labels. None for one label.
        bins: Bins of the logits of binary labels, for the AUC.
        shape: Leading dimensions of the sums: (S,) keeps the sums of S subsets of the samples.
    """

    def __init__(
        self,
        kinds: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        names: Sequence[str] | None = None,
        bins: LogitBins | None = None,
        shape: tuple[int, ...] = (),
    ) -> None:
        self._names, self._device = names, torch.device(device or "cpu")
        kinds = kinds or ["binary"] * (1 if names is None else len(names))
        self._count = len(kinds)
        self._sums_by_kind: list[tuple[torch.Tensor, BinarySums | NumberSums]] = []  # label numbers, and their sums
        for kind in dict.fromkeys(kinds):
            label_numbers = torch.tensor(
                [index for index, label_kind in enumerate(kinds) if label_kind == kind], device=device
            )
            of_kind = (
                NumberSums(len(label_numbers), device, shape)
                if kind == "number"
                else BinarySums(len(label_numbers), device, bins or LogitBins(), shape)
            )
            self._sums_by_kind.append((label_numbers, of_kind))

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The sums by name, which `update` changes in place."""
        return {name: tensor for _, sums in self._sums_by_kind for name, tensor in sums.tensors.items()}

    def update(
        self,
        logits: torch.Tensor,
        labels: torch.Tensor,
        weights_B: torch.Tensor | None = None,
        subset_B: torch.Tensor | None = None,
    ) -> None:
        """Adds a batch. Never waits for the device.

        Args:
            logits: [B], or [B, T] with several labels: logits of binary labels, predictions of numbers. B may be 0.
            labels: The same shape: 0 or 1, or a number; NaN if a label was not observed.
            weights_B: [B], finite and at least 0. Default: all 1.
            subset_B: [B], the subset of each row, in [0, S); only with `shape` (S,).

        Raises:
            ValueError: Other shapes.
        """
        tail = [] if self._names is None else [self._count]
        if logits.shape != labels.shape or logits.dim() < 1 or list(logits.shape[1:]) != tail:
            raise ValueError(
                f"logits {list(logits.shape)} and labels {list(labels.shape)} must both be of shape "
                + (f"[B, {self._count}]" if tail else "[B]; squeeze the last dimension of a [B, 1] output")
            )
        if weights_B is not None and weights_B.shape != labels.shape[:1]:
            raise ValueError(f"weights {list(weights_B.shape)} must be [B], as labels {list(labels.shape)} have B rows")
        outputs_BT, labels_BT = (
            inputs.detach().to(self._device).double().reshape(len(labels), self._count) for inputs in (logits, labels)
        )
        weights_BT = seen_BT = (~labels_BT.isnan()).double()
        if weights_B is not None:
            weights_BT = seen_BT * weights_B.detach().to(self._device).double()[:, None]
        labels_BT = labels_BT.nan_to_num()
        if len(self._sums_by_kind) == 1:
            self._sums_by_kind[0][1].add(outputs_BT, labels_BT, weights_BT, seen_BT, subset_B)
            return
        for label_numbers, sums in self._sums_by_kind:
            sums.add(
                outputs_BT[:, label_numbers],
                labels_BT[:, label_numbers],
                weights_BT[:, label_numbers],
                seen_BT[:, label_numbers],
                subset_B,
            )

    def compute(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """Metrics of all batches since the last `reset`.

        Args:
            group: Process group of the ranks to combine by one all-reduce; every rank must call this. None for this
                process alone.
        """
        return self.metrics_of(self.state(group))

    def metrics_of(self, state: Mapping[str, torch.Tensor]) -> dict[str, Any]:
        """Metrics of a result of `state`, or of one subset of it."""
        metrics = {}
        for label_numbers, sums in self._sums_by_kind:
            for label, number in enumerate(label_numbers.tolist()):
                metrics[number] = sums.metrics(*(state[name][label] for name in sums.tensors))
        if self._names is None:
            return metrics[0]
        return {**metrics[0], "tasks": {name: metrics[number] for number, name in enumerate(self._names)}}

    def reliability_of(self, state: Mapping[str, torch.Tensor]) -> list[dict[str, Any]]:
        """The points of the reliability diagram of each binary label, from a result of `state`.

        Returns:
            `label` (None for one label), `weight`, `predicted` and `observed` of each band; see `reliability`.
        """
        return [
            {"label": self._names and self._names[number], "weight": weight, "predicted": mean, "observed": share}
            for label_numbers, sums in self._sums_by_kind
            if isinstance(sums, BinarySums)
            for label, number in enumerate(label_numbers.tolist())
            for weight, mean, share in reliability(state["counts"][label], sums.bins).tolist()
        ]

    def reset(self) -> None:
        """Discards all batches."""
        for tensor in self.tensors.values():
            tensor.zero_()

    def state(self, group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
        """Copies the state to the CPU for a checkpoint: float64 sums by name, with a row per label of their kind.

        The state of a run is the sum over its ranks. With a `group` this returns the sum (collective like `compute`);
        load it on one rank of the resumed run, whatever the number of ranks, and start the others empty.
        """
        tensors = self.tensors
        if group is None:
            return {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        packed = all_reduce(torch.cat([tensor.view(-1) for tensor in tensors.values()]), group).cpu()
        flat_tensors = packed.split([tensor.numel() for tensor in tensors.values()])
        return {name: tensor.view_as(tensors[name]).clone() for name, tensor in zip(tensors, flat_tensors, strict=True)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces the state by a result of `state`.

        Raises:
            ValueError: Not a state, or a state of other labels or bins.
        """
        tensors = self.tensors
        if set(state) != set(tensors):
            raise ValueError(f"metrics state has {sorted(state)}; expected {sorted(tensors)}")
        for name, current in tensors.items():
            if state[name].shape != current.shape:
                raise ValueError(
                    f"metrics state {name!r} has shape {list(state[name].shape)}, expected {list(current.shape)}; "
                    "create LabelMetrics with the same bins and labels"
                )
            current.copy_(state[name])
