"""`LabelMetrics`: quality of a model's predictions, over any number of batches and ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from rayrec.distributed.comm import all_reduce
from rayrec.metrics.binary import BinarySums
from rayrec.metrics.histogram import LogitBins
from rayrec.metrics.numbers import NumberSums

if TYPE_CHECKING:
    import torch.distributed as dist


class LabelMetrics:
    """The figures of labels that are binary (see `BinarySums`), numbers (`NumberSums`), or some of both, accumulated in
    bounded memory. Of several labels, those of each are in `tasks` by name, and the first one's stand above.

    With weights, every sum over examples is weighted: an example of weight 2 counts twice. Only `samples` is not
    weighted. NaN means that a label was not observed: the example does not count for it.

    Args:
        kinds: "binary" or "number" for each label; None: all binary.
        device: where the state lives (1 MiB a binary label); that of the logits avoids copies.
        names: of T labels; None for one label.
        bins: how logits of binary labels are binned for the AUC.
    """

    def __init__(
        self,
        kinds: Sequence[str] | None = None,
        device: torch.device | str | None = None,
        names: Sequence[str] | None = None,
        bins: LogitBins | None = None,
    ) -> None:
        self._names, self._device = names, torch.device(device or "cpu")
        kinds = kinds or ["binary"] * (1 if names is None else len(names))
        self._count = len(kinds)
        self._parts: list[tuple[torch.Tensor, BinarySums | NumberSums]] = []  # places of labels, and their sums
        for kind in dict.fromkeys(kinds):
            own = torch.tensor([place for place, one in enumerate(kinds) if one == kind], device=device)
            of_kind = (
                NumberSums(len(own), device) if kind == "number" else BinarySums(len(own), device, bins or LogitBins())
            )
            self._parts.append((own, of_kind))

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: tensor for _, sums in self._parts for name, tensor in sums.tensors.items()}

    def update(self, logits: torch.Tensor, labels: torch.Tensor, weights_B: torch.Tensor | None = None) -> None:
        """Adds a batch; never waits for the device.

        Args:
            logits: floating [B], or [B, T] with several labels: logits of binary labels, predictions of numbers; B may
                be 0.
            labels: of the same shape, 0 or 1 or a number, NaN where a label was not observed.
            weights_B: [B], each finite and at least 0; None: all 1.

        Raises:
            ValueError: the shapes are not these.
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
            given.detach().to(self._device).double().reshape(len(labels), self._count) for given in (logits, labels)
        )
        weights_BT = seen_BT = (~labels_BT.isnan()).double()
        if weights_B is not None:
            weights_BT = seen_BT * weights_B.detach().to(self._device).double()[:, None]
        labels_BT, seen_T = labels_BT.nan_to_num(), seen_BT.sum(0)
        if len(self._parts) == 1:
            self._parts[0][1].add(outputs_BT, labels_BT, weights_BT, seen_T)
            return
        for own, sums in self._parts:
            sums.add(outputs_BT[:, own], labels_BT[:, own], weights_BT[:, own], seen_T[own])

    def compute(self, group: dist.ProcessGroup | None = None) -> dict[str, Any]:
        """The figures of all that was added since the last `reset`.

        Args:
            group: sums over its ranks, each of which must call this, at the cost of one all-reduce; None for what
                this process saw alone.
        """
        state, figures = self.state(group), {}
        for own, sums in self._parts:
            for label, place in enumerate(own.tolist()):
                figures[place] = sums.figures(*(state[name][label] for name in sums.tensors))
        if self._names is None:
            return figures[0]
        return {**figures[0], "tasks": {name: figures[place] for place, name in enumerate(self._names)}}

    def reset(self) -> None:
        """Forgets every batch."""
        for tensor in self._tensors.values():
            tensor.zero_()

    def state(self, group: dist.ProcessGroup | None = None) -> dict[str, torch.Tensor]:
        """A copy of the state, on the CPU, for a checkpoint: float64 sums by name, a row a label of their kind.

        States add up: that of a run is the sum over its ranks. With a `group` it is that sum (collective like
        `compute`), and belongs to one rank of the resumed run, whatever the number of ranks; the others start empty.
        """
        tensors = self._tensors
        if group is None:
            return {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        packed = all_reduce(torch.cat([tensor.view(-1) for tensor in tensors.values()]), group).cpu()
        parts = packed.split([tensor.numel() for tensor in tensors.values()])
        return {name: part.view_as(tensors[name]).clone() for name, part in zip(tensors, parts, strict=True)}

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces the state by one that `state` gave.

        Raises:
            ValueError: it is not such a state, or was made with other labels or bins.
        """
        tensors = self._tensors
        if set(state) != set(tensors):
            raise ValueError(f"metrics state has {sorted(state)}; expected {sorted(tensors)}")
        for name, current in tensors.items():
            if state[name].shape != current.shape:
                raise ValueError(
                    f"metrics state {name!r} has shape {list(state[name].shape)}, this one {list(current.shape)}: "
                    "make LabelMetrics with the same bins and labels"
                )
            current.copy_(state[name])
