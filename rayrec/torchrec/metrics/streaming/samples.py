"""`WindowSamples`: keeps the last examples, for metrics of their order: exact areas under curves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rayrec.torchrec.metrics.streaming.measure import Examples, Options
from rayrec.torchrec.metrics.streaming.sums import Figure

Area = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of predictions, labels, weights, each [N]


class WindowSamples(torch.nn.Module):
    """The last examples of T tasks, float32 [3, T, N], and their groups.

    Args:
        name: of the metric, "auc", "auprc" or "rauc".
        options: `grouped_<name>`: also the mean over groups, whose keys the model gives as `grouping_keys`.
        num_tasks: T.
        window: examples that this rank keeps.
    """

    def __init__(self, name: str, options: Options, num_tasks: int, window: int) -> None:
        super().__init__()
        self._name, self._options, self._window = name, options, window
        self._empty = (torch.zeros(3, num_tasks, 0), torch.zeros(0, dtype=torch.int64))
        self.reset()
        self._run = [0.0, 0.0]  # of "auprc": Σ area · weight and Σ weight over the calls of `figures`

    def add(self, examples: Examples) -> None:
        """Adds a batch, and drops examples that are older than the window."""
        batch = torch.stack((examples.predictions, examples.labels_TB, examples.weights_TB)).float()
        self._parts.append(batch[:, :, -self._window :])
        keys = examples.inputs["grouping_keys"][0] if self._grouped else examples.labels_TB.new_zeros(examples.count)
        self._keys.append(keys.long()[-self._window :])
        self._held += len(self._keys[-1])
        while (excess := self._held - self._window) > 0:
            leave = min(excess, len(self._keys[0]))
            self._parts[0], self._keys[0] = self._parts[0][:, :, leave:], self._keys[0][leave:]
            self._held -= leave
            if not len(self._keys[0]):
                self._parts.popleft(), self._keys.popleft()

    @property
    def _grouped(self) -> bool:
        return bool(self._options[f"grouped_{self._name}"])

    def figures(self) -> list[Figure]:
        """Of the window; after `take`, of all ranks' windows."""
        (samples, keys), area = self.kept(), AREAS[self._name]
        if self._options.get("apply_bin"):
            samples = torch.stack((samples[0], (samples[1] >= 0.039).float(), samples[2]))
        by_task = samples.double().unbind(1)
        areas_T = torch.stack([area(*of_task) for of_task in by_task]).float()
        found: list[Figure] = [("window_", self._name, areas_T)]
        if self._name == "auprc":
            weight = float(samples[2].sum())
            self._run[0] += float(areas_T.sum()) * weight
            self._run[1] += weight * len(areas_T)
            so_far = self._run[0] / self._run[1] if self._run[1] else 0.5
            found.append(("lifetime_", self._name, torch.full_like(areas_T, so_far, dtype=torch.float64)))
        if self._grouped:
            means = [_mean_over_groups(area, of_task, keys) for of_task in by_task]
            found.append(("window_", f"grouped_{self._name}", torch.stack(means).float()))
        return found

    def reset(self) -> None:
        self.take(self.flat(), [self._empty])

    def flat(self) -> torch.Tensor:
        """What adds up over ranks: nothing."""
        return torch.zeros(0, dtype=torch.float64)

    def kept(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(float32 [3, T, N], int64 [N])."""
        device = self._parts[-1].device
        return torch.cat([part.to(device) for part in self._parts], -1), torch.cat([k.to(device) for k in self._keys])

    def take(self, flat: torch.Tensor, kept: Sequence[Any]) -> None:
        """Makes the examples those of several `kept`."""
        self._parts, self._keys = deque(samples for samples, _ in kept), deque(keys for _, keys in kept)
        self._held = sum(len(keys) for keys in self._keys)


def _mean_over_groups(area: Area, samples: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Unweighted mean over groups; 0.5 without any."""
    areas = [area(*samples[:, keys == key]) for key in keys.unique()]
    return torch.stack(areas).mean() if areas else samples.new_tensor(0.5)


def auc(predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Area under the ROC curve; a pair of equal predictions counts half. 0.5 where a class has no weight."""
    found, false = _cumulated(predictions, labels, weights)
    if not len(found) or not found[-1] * false[-1]:
        return predictions.new_tensor(0.5)
    return torch.trapezoid(_from_zero(found), _from_zero(false)) / found[-1] / false[-1]


def auprc(predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Average precision: over thresholds, the precision times the recall gained. 0 without a positive."""
    found, false = _cumulated(predictions, labels, weights)
    if not len(found) or not found[-1]:
        return predictions.new_tensor(0.0)
    precision = (found / (found + false)).nan_to_num()
    return (precision * _from_zero(found).diff()).sum() / found[-1]


def rauc(predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """The share of pairs that predictions order as labels do; weights do not count. 0.5 of fewer than two examples."""
    count = len(predictions)
    if count < 2:
        return predictions.new_tensor(0.5)
    order = labels.argsort()
    order = order[predictions[order].argsort(stable=True)]
    ranks = labels[order].unique(return_inverse=True)[1]
    wrong, bit = 0.0, int(ranks.max()).bit_length()
    while bit:  # pairs that first differ in this bit, among those alike in all higher ones
        bit -= 1
        by_head = (ranks >> (bit + 1)).argsort(stable=True)
        heads, ones = ranks[by_head] >> (bit + 1), (ranks[by_head] >> bit) & 1
        _, lengths = heads.unique_consecutive(return_counts=True)
        before = ones.cumsum(0) - ones
        before = before - before[lengths.cumsum(0) - lengths].repeat_interleave(lengths)
        wrong += float((before * (1 - ones)).sum())
    return predictions.new_tensor(1 - wrong / (count * (count - 1) / 2))


def _cumulated(
    predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Weights of positives and of negatives from each distinct prediction on, the highest first."""
    order = predictions.argsort(descending=True)
    last_of_tie = torch.ones_like(order, dtype=torch.bool)
    last_of_tie[:-1] = predictions[order].diff() != 0
    found, false = ((weights * part)[order].cumsum(0)[last_of_tie] for part in (labels, 1 - labels))
    return found, false


def _from_zero(values: torch.Tensor) -> torch.Tensor:
    return torch.cat((values.new_zeros(1), values))


AREAS: Mapping[str, Area] = {"auc": auc, "auprc": auprc, "rauc": rauc}
SAMPLE_OPTIONS: Mapping[str, Options] = {
    "auc": {"grouped_auc": False, "apply_bin": False},
    "auprc": {"grouped_auprc": False},
    "rauc": {"grouped_rauc": False},
}
