"""`WindowSamples`, which keeps the last examples, for metrics of their order: exact areas under curves."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rayrec.torchrec.metrics.streaming.measure import Examples, Options
from rayrec.torchrec.metrics.streaming.sums import Result

Area = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # of predictions, labels and weights [N]


class WindowSamples(torch.nn.Module):
    """The last examples of T tasks, float32 [3, T, N], and their groups.

    Args:
        name: the metric, "auc", "auprc" or "rauc".
        options: `grouped_<name>` adds the mean over groups; the model output `grouping_keys` holds their keys.
        num_tasks: T.
        window: number of examples that this rank keeps.
    """

    def __init__(self, name: str, options: Options, num_tasks: int, window: int) -> None:
        super().__init__()
        self._name, self._options, self._window = name, options, window
        self._empty = (torch.zeros(3, num_tasks, 0), torch.zeros(0, dtype=torch.int64))
        self.reset()
        self._lifetime = [0.0, 0.0]  # for "auprc": Σ area · weight and Σ weight over the calls of `results`

    def add(self, examples: Examples) -> None:
        """Adds a batch, and drops the examples before the window."""
        batch = torch.stack((examples.predictions, examples.labels_TB, examples.weights_TB)).float()
        self._batches.append(batch[:, :, -self._window :])
        keys = examples.inputs["grouping_keys"][0] if self._grouped else examples.labels_TB.new_zeros(examples.count)
        self._keys.append(keys.long()[-self._window :])
        self._num_examples += len(self._keys[-1])
        while (excess := self._num_examples - self._window) > 0:
            dropped = min(excess, len(self._keys[0]))
            self._batches[0], self._keys[0] = self._batches[0][:, :, dropped:], self._keys[0][dropped:]
            self._num_examples -= dropped
            if not len(self._keys[0]):
                self._batches.popleft(), self._keys.popleft()

    @property
    def _grouped(self) -> bool:
        return bool(self._options[f"grouped_{self._name}"])

    def results(self) -> list[Result]:
        """Returns the results of the window; after `load_state`, of the windows of all ranks."""
        (samples, keys), area = self.gathered_state(), AREAS[self._name]
        if self._options.get("apply_bin"):
            samples = torch.stack((samples[0], (samples[1] >= 0.039).float(), samples[2]))
        by_task = samples.double().unbind(1)
        areas_T = torch.stack([area(*task_samples) for task_samples in by_task]).float()
        results: list[Result] = [("window_", self._name, areas_T)]
        if self._name == "auprc":
            weight = float(samples[2].sum())
            self._lifetime[0] += float(areas_T.sum()) * weight
            self._lifetime[1] += weight * len(areas_T)
            mean = self._lifetime[0] / self._lifetime[1] if self._lifetime[1] else 0.5
            results.append(("lifetime_", self._name, torch.full_like(areas_T, mean, dtype=torch.float64)))
        if self._grouped:
            means = [_mean_over_groups(area, task_samples, keys) for task_samples in by_task]
            results.append(("window_", f"grouped_{self._name}", torch.stack(means).float()))
        return results

    def reset(self) -> None:
        self.load_state(self.summed_state(), [self._empty])

    def summed_state(self) -> torch.Tensor:
        """Returns no state; nothing is summed over ranks."""
        return torch.zeros(0, dtype=torch.float64)

    def gathered_state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the examples, float32 [3, T, N], and the keys of their groups, int64 [N]."""
        device = self._batches[-1].device
        samples = torch.cat([batch.to(device) for batch in self._batches], -1)
        return samples, torch.cat([keys.to(device) for keys in self._keys])

    def load_state(self, summed: torch.Tensor, gathered: Sequence[Any]) -> None:
        """Sets the examples from the `gathered_state` of all ranks."""
        self._batches, self._keys = deque(samples for samples, _ in gathered), deque(keys for _, keys in gathered)
        self._num_examples = sum(len(keys) for keys in self._keys)


def _mean_over_groups(area: Area, samples: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Returns the unweighted mean over groups; 0.5 without groups."""
    areas = [area(*samples[:, keys == key]) for key in keys.unique()]
    return torch.stack(areas).mean() if areas else samples.new_tensor(0.5)


def auc(predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the area under the ROC curve. A pair of equal predictions counts 1/2. 0.5 if a class has no weight."""
    positives, negatives = _cumulated(predictions, labels, weights)
    if not len(positives) or not positives[-1] * negatives[-1]:
        return predictions.new_tensor(0.5)
    return torch.trapezoid(_from_zero(positives), _from_zero(negatives)) / positives[-1] / negatives[-1]


def auprc(predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the average precision: Σ precision · increase of recall over thresholds. 0 without positives."""
    positives, negatives = _cumulated(predictions, labels, weights)
    if not len(positives) or not positives[-1]:
        return predictions.new_tensor(0.0)
    precision = (positives / (positives + negatives)).nan_to_num()
    return (precision * _from_zero(positives).diff()).sum() / positives[-1]


def rauc(predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns the fraction of pairs that predictions order as labels do, without weights. 0.5 for fewer than two
    examples."""
    count = len(predictions)
    if count < 2:
        return predictions.new_tensor(0.5)
    order = labels.argsort()
    order = order[predictions[order].argsort(stable=True)]
    ranks = labels[order].unique(return_inverse=True)[1]
    wrong, bit = 0.0, int(ranks.max()).bit_length()
    while bit:  # count the pairs with equal higher bits that differ in this bit
        bit -= 1
        by_head = (ranks >> (bit + 1)).argsort(stable=True)
        heads, ones = ranks[by_head] >> (bit + 1), (ranks[by_head] >> bit) & 1
        _, lengths = heads.unique_consecutive(return_counts=True)
        preceding_ones = ones.cumsum(0) - ones
        preceding_ones -= preceding_ones[lengths.cumsum(0) - lengths].repeat_interleave(lengths)
        wrong += float((preceding_ones * (1 - ones)).sum())
    return predictions.new_tensor(1 - wrong / (count * (count - 1) / 2))


def _cumulated(
    predictions: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the weights of positives and of negatives at or above each distinct prediction, in descending order."""
    order = predictions.argsort(descending=True)
    last_of_tie = torch.ones_like(order, dtype=torch.bool)
    last_of_tie[:-1] = predictions[order].diff() != 0
    positives = (weights * labels)[order].cumsum(0)[last_of_tie]
    negatives = (weights * (1 - labels))[order].cumsum(0)[last_of_tie]
    return positives, negatives


def _from_zero(values: torch.Tensor) -> torch.Tensor:
    return torch.cat((values.new_zeros(1), values))


AREAS: Mapping[str, Area] = {"auc": auc, "auprc": auprc, "rauc": rauc}
SAMPLE_OPTIONS: Mapping[str, Options] = {
    "auc": {"grouped_auc": False, "apply_bin": False},
    "auprc": {"grouped_auprc": False},
    "rauc": {"grouped_rauc": False},
}
