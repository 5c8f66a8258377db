"""What is measured between two logging steps: loss, quality, speed, time spent waiting for data, rows of tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rayrec.distributed.comm import Group
from rayrec.metrics import LabelMetrics
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train.worker.lockstep import Control, NotFiniteError, StepInput


class Window:
    """Sums over the steps since the last `close`; adding a step never waits for the device.

    Args:
        names: of several labels.
        kinds: "binary" or "number" for each label.
    """

    def __init__(
        self,
        device: torch.device,
        control: Control,
        group: Group,
        names: Sequence[str] | None = None,
        kinds: Sequence[str] = ("binary",),
    ) -> None:
        self._control, self._group = control, group
        self._metrics = LabelMetrics(kinds, device, names)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._weight = 0.0
        self._rows = self._all_rows = 0
        self._wait_s = self._exchange_s = self._seconds = 0.0

    def add(
        self, given: StepInput, loss: torch.Tensor, logits_B: torch.Tensor, seconds: float, exchange_s: float = 0.0
    ) -> None:
        """One step.

        Args:
            loss: this rank's mean; `logits_B`: its logits.
            seconds: how long the step took, with its wait for data.
            exchange_s: how much of that this rank's host waited in exchanges.
        """
        self._loss += loss.double() * given.weight
        self._metrics.update(logits_B, given.batch.label, given.batch.weight)
        self._weight += given.weight
        self._rows += given.batch.rows
        self._all_rows += given.rows
        self._wait_s += given.wait_s
        self._exchange_s += exchange_s
        self._seconds += seconds

    @property
    def empty(self) -> bool:
        return self._all_rows == 0

    def close(self, step: int) -> dict[str, Any]:
        """Figures of the window, over all ranks; starts a new one. A collective.

        Raises:
            NotFiniteError: the loss is not a finite number any more.
        """
        loss_sum, weight, rows, wait_s, exchange_s, seconds = self._control.sums(self._sums())
        quality = self._metrics.compute(self._group)
        figures = {
            "loss": loss_sum / weight if weight else None,
            **_quality(quality),
            "samples_per_second": rows / max(seconds / self._control.world_size, 1e-9),
            "data_wait_fraction": min(1.0, wait_s / max(seconds, 1e-9)),
            "exchange_fraction": min(1.0, exchange_s / max(seconds, 1e-9)),
        }
        if "tasks" in quality:
            tasks = quality["tasks"].items()
            figures["tasks"] = {name: _quality(task) for name, task in tasks}
        self._metrics.reset()
        self._loss.zero_()
        self._weight = 0.0
        self._rows = self._all_rows = 0
        self._wait_s = self._exchange_s = self._seconds = 0.0
        _refuse_infinite(loss_sum, step)
        return figures

    def state(self) -> dict[str, torch.Tensor]:
        """What the ranks have seen together, for a checkpoint; a collective."""
        totals = torch.tensor([*self._control.sums(self._sums()), self._all_rows], dtype=torch.float64)
        return {"window/sums": totals, **{f"window/{k}": v for k, v in self._metrics.state(self._group).items()}}

    def _sums(self) -> list[float]:
        """What this rank has added up, apart from the rows of all ranks."""
        return [float(self._loss), self._weight, self._rows, self._wait_s, self._exchange_s, self._seconds]

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Go on from what `state` gave, if anything: rank 0 has seen it all."""
        own = {key.removeprefix("window/"): value for key, value in state.items() if key.startswith("window/")}
        if not own:
            return
        *sums, all_rows = own.pop("sums").tolist()
        self._all_rows = int(all_rows)
        if self._control.rank == 0:
            loss, self._weight, rows, self._wait_s, self._exchange_s, self._seconds = sums
            self._loss.fill_(loss)
            self._rows = int(rows)
            self._metrics.load_state(own)

    def check(self, step: int, sound: bool = True) -> None:
        """A collective that only looks at the loss, so that one that is not finite never reaches a checkpoint.

        Args:
            sound: whether this rank's parameters are finite.

        Raises:
            NotFiniteError: on every rank, if it is not a finite number any more.
        """
        (loss_sum,) = self._control.sums([float(self._loss) if sound else math.nan])
        _refuse_infinite(loss_sum, step)


def _quality(figures: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a label in lines of training: of a binary one `ne` and `auc`, of a number `rmse` and `r2`."""
    return {name: figures[name] for name in ("ne", "auc", "rmse", "r2") if name in figures}


def _refuse_infinite(loss_sum: float, step: int) -> None:
    if not math.isfinite(loss_sum):
        raise NotFiniteError(
            f"the loss is not a finite number any more at step {step}; earlier checkpoints are intact: lower "
            f"optimizers.dense.lr or optimizers.sparse.lr, and check dense features for extreme values"
        )


def touched(sparse: KeyedJaggedTensor, tables: Iterable[tuple[str, Iterable[str]]]) -> dict[str, dict[str, Any]]:
    """By table: `ids` that the batch has for it, `rows` of it that those are, and `top`, the part of the ids that are
    of the most frequent row (None without an id). Waits for the device.

    Args:
        sparse: a batch's features.
        tables: names of tables, each with its features.
    """
    features = sparse.to_dict()
    found = {}
    for table, names in tables:
        ids = torch.cat([features[name].values() for name in names])
        counts = torch.unique(ids, return_counts=True)[1]
        top = float(counts.max()) / ids.numel() if ids.numel() else None
        found[table] = {"ids": ids.numel(), "rows": counts.numel(), "top": top}
    return found
