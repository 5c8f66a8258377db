"""Metrics between two logging steps: loss, quality, speed, data wait, lookups per table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from rayrec.distributed.comm import Group, sum_on_rank_0
from rayrec.metrics import LabelMetrics
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train.worker.lockstep import Control, NotFiniteError, StepInput


class Window:
    """Sums over the steps since the last `close`. Adding a step never waits for the device.

    Args:
        names: names of the labels, if there are several.
        kinds: "binary" or "number" for each label; None: without metrics of labels, for a retriever.
    """

    def __init__(
        self,
        device: torch.device,
        control: Control,
        group: Group,
        names: Sequence[str] | None = None,
        kinds: Sequence[str] | None = ("binary",),
    ) -> None:
        self._control, self._group = control, group
        self._metrics = None if kinds is None else LabelMetrics(kinds, device, names)
        self._loss = torch.zeros((), dtype=torch.float64, device=device)
        self._weight = 0.0
        self._rows = self._all_rows = 0
        self._wait_s = self._exchange_s = self._seconds = 0.0

    def add(
        self, step: StepInput, loss: torch.Tensor, logits_B: torch.Tensor, seconds: float, exchange_s: float = 0.0
    ) -> None:
        """Add a step.

        Args:
            loss: mean over this rank's rows.
            logits_B: of this rank's rows.
            seconds: duration of the step, including its wait for data.
            exchange_s: the part of it in which this rank's host waited in collectives.
        """
        self._loss += loss.double() * step.weight
        if self._metrics is not None:
            self._metrics.update(logits_B, step.batch.label, step.batch.weight)
        self._weight += step.weight
        self._rows += step.batch.rows
        self._all_rows += step.rows
        self._wait_s += step.wait_s
        self._exchange_s += exchange_s
        self._seconds += seconds

    @property
    def empty(self) -> bool:
        return self._all_rows == 0

    def close(self, step: int) -> dict[str, Any]:
        """Metrics of the window over all ranks; starts a new window. A collective.

        Raises:
            NotFiniteError: the loss is not finite.
        """
        loss_sum, weight, rows, wait_s, exchange_s, seconds = self._control.sums(self._sums())
        quality = {} if self._metrics is None else self._metrics.compute(self._group)
        metrics = {
            "loss": loss_sum / weight if weight else None,
            **_quality(quality),
            "samples_per_second": rows / max(seconds / self._control.world_size, 1e-9),
            "data_wait_fraction": min(1.0, wait_s / max(seconds, 1e-9)),
            "exchange_fraction": min(1.0, exchange_s / max(seconds, 1e-9)),
        }
        if "tasks" in quality:
            tasks = quality["tasks"].items()
            metrics["tasks"] = {name: _quality(task) for name, task in tasks}
        if self._metrics is not None:
            self._metrics.reset()
        self._loss.zero_()
        self._weight = 0.0
        self._rows = self._all_rows = 0
        self._wait_s = self._exchange_s = self._seconds = 0.0
        _refuse_infinite(loss_sum, step)
        return metrics

    def state(self, step: int, sound: bool = True) -> dict[str, torch.Tensor]:
        """Sums over all ranks, for a checkpoint: all of them on rank 0, which writes them. A collective.

        Args:
            sound: whether this rank's parameters are finite.

        Raises:
            NotFiniteError: on every rank, if the loss or a parameter is not finite on some rank.
        """
        loss_sum, *others = self._sums()
        sums = self._control.sums([loss_sum if sound else math.nan, *others])
        _refuse_infinite(sums[0], step)
        state = {"sums": torch.tensor([*sums, self._all_rows], dtype=torch.float64), **self._metrics_state()}
        return {f"window/{name}": tensor for name, tensor in state.items()}

    def _metrics_state(self) -> dict[str, torch.Tensor]:
        if self._metrics is None:
            return {}
        if self._loss.device.type != "cpu":
            return self._metrics.state(self._group)
        state = self._metrics.state()
        total = sum_on_rank_0(torch.cat([tensor.flatten() for tensor in state.values()]), self._control.group)
        if total is None:
            return {}
        parts = total.split([tensor.numel() for tensor in state.values()])
        return {name: part.view_as(state[name]) for name, part in zip(state, parts, strict=True)}

    def _sums(self) -> list[float]:
        """The sums of this rank."""
        return [float(self._loss), self._weight, self._rows, self._wait_s, self._exchange_s, self._seconds]

    def load_state(self, state: Mapping[str, torch.Tensor]) -> None:
        """Restore the result of `state`; rank 0 receives the sums over all ranks."""
        saved = {key.removeprefix("window/"): value for key, value in state.items() if key.startswith("window/")}
        if not saved:
            return
        *sums, all_rows = saved.pop("sums").tolist()
        self._all_rows = int(all_rows)
        if self._control.rank == 0:
            loss, self._weight, rows, self._wait_s, self._exchange_s, self._seconds = sums
            self._loss.fill_(loss)
            self._rows = int(rows)
            if self._metrics is not None:
                self._metrics.load_state(saved)


def _quality(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics of a label that training logs: `ne` and `auc` for a binary label (and `auc_error`, see
    `BinarySums`), `rmse` and `r2` for a number."""
    return {name: metrics[name] for name in ("ne", "auc", "auc_error", "rmse", "r2") if name in metrics}


def _refuse_infinite(loss_sum: float, step: int) -> None:
    if not math.isfinite(loss_sum):
        raise NotFiniteError(
            f"the loss is not finite at step {step}; lower optimizers.dense.lr or optimizers.sparse.lr, and check "
            f"dense features for extreme values (earlier checkpoints are intact)"
        )


# A rank with more lookups than this times the mean is reported; fewer ids say little.
UNEVEN, FEWEST_IDS = 1.5, 10_000


def uneven_lookups(counts: Sequence[int]) -> str | None:
    """A warning if a rank looks up many more ids than the others; `counts` are the ids that each rank looks up."""
    worst, mean = max(range(len(counts)), key=counts.__getitem__), sum(counts) / len(counts)
    if sum(counts) < FEWEST_IDS or counts[worst] <= UNEVEN * mean:
        return None
    return (
        f"rank {worst} looks up {counts[worst] / mean:.1f} times as many ids as the mean rank, and the others wait for "
        "it; `rayrec data check CONFIG` shows how uneven each table's ids are, plan.json which tables the rank holds; "
        "restrict them in sharding.constraints"
    )


def touched(sparse: KeyedJaggedTensor, tables: Iterable[tuple[str, Iterable[str]]]) -> dict[str, dict[str, Any]]:
    """For each table, the number of `ids` in a batch, the number of distinct `rows` among them, and `top`, the fraction
    of ids that are the most frequent row (None without ids). Waits for the device.

    Args:
        sparse: a batch's lookups.
        tables: names of tables, each with its features; those that are not looked up have no ids.
    """
    features, none = sparse.to_dict(), sparse.values()[:0]
    lookups = {}
    for table, names in tables:
        ids = torch.cat([none, *(features[name].values() for name in names if name in features)])
        counts = torch.unique(ids, return_counts=True)[1]
        top = float(counts.max()) / ids.numel() if ids.numel() else None
        lookups[table] = {"ids": ids.numel(), "rows": counts.numel(), "top": top}
    return lookups
