"""Negative samplers, and expected item counts q per batch, whose log corrects the scores.

A sampler draws the same ids on every rank. They depend only on the seed and the step, so a resumed run, also with
another number of ranks, draws the same ids.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Candidates:
    """Candidates of a step: ids `[C]`, and the log of the expected count of each among them, `[C]`."""

    ids: torch.Tensor
    log_q: torch.Tensor


class UniformSampler(nn.Module):
    """Draws `count` items uniformly, with replacement."""

    def __init__(self, num_items: int, count: int, seed: int) -> None:
        super().__init__()
        self.num_items, self.count, self.seed = num_items, count, seed

    def draw(self, step: int, device: torch.device) -> Candidates:
        """Returns the candidates of `step`; identical on every rank."""
        ids = torch.randint(self.num_items, (self.count,), generator=_generator(self.seed, step)).to(device)
        return Candidates(ids, self.log_q(ids))

    def log_q(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the log of the expected count of each id in a draw."""
        return torch.full((len(ids),), self.count / self.num_items, device=ids.device).log()


class PopularitySampler(nn.Module):
    """Draws `count` items with replacement, with a probability proportional to their counts to the power of `power`.

    Args:
        counts: count of each item in the training data, by id.
        count: items to draw.
        power: 1: as in the data; 0: uniform.
    """

    _cumulated: torch.Tensor
    _log_expected: torch.Tensor

    def __init__(self, counts: Sequence[float] | torch.Tensor, count: int, seed: int, power: float = 1.0) -> None:
        super().__init__()
        weights = torch.as_tensor(counts, dtype=torch.float64) ** power
        if not float(weights.sum()) > 0:
            raise ValueError("popularity sampler: at least one of the counts must be above 0")
        share = weights / weights.sum()
        self.count, self.seed = count, seed
        self.register_buffer("_cumulated", share.cumsum(0), persistent=False)
        self.register_buffer("_log_expected", (share * count).clamp(min=1e-12).log().float(), persistent=False)

    def draw(self, step: int, device: torch.device) -> Candidates:
        """See `UniformSampler.draw`."""
        uniform = torch.rand(self.count, generator=_generator(self.seed, step), dtype=torch.float64).to(device)
        ids = torch.searchsorted(self._cumulated, uniform, right=True).clamp(max=len(self._cumulated) - 1)
        return Candidates(ids, self.log_q(ids))

    def log_q(self, ids: torch.Tensor) -> torch.Tensor:
        """See `UniformSampler.log_q`."""
        return self._log_expected[ids]


SAMPLERS: dict[str, Callable[..., UniformSampler | PopularitySampler]] = {
    "uniform": UniformSampler,
    "popularity": PopularitySampler,
}


class KnownFrequency(nn.Module):
    """Expected count of an item among the positives of a step, from its count in the training data."""

    _log_share: torch.Tensor

    def __init__(self, counts: Sequence[float] | torch.Tensor) -> None:
        super().__init__()
        numbers = torch.as_tensor(counts, dtype=torch.float64)
        share = numbers.clamp(min=0.5) / numbers.sum()  # an item with count 0 may still occur
        self.register_buffer("_log_share", share.log().float(), persistent=False)

    def log_q(self, ids: torch.Tensor, all_ids: torch.Tensor, step: int) -> torch.Tensor:
        """Returns `[len(ids)]`; `all_ids` are the positives of all ranks."""
        return self._log_share[ids] + torch.tensor(float(max(len(all_ids), 1)), device=ids.device).log()


class StreamingFrequency(nn.Module):
    """Expected count among the positives of a step, estimated during training.

    The count is 1 over the mean number of steps per occurrence of an item: Yi et al. 2019, "Sampling-bias-corrected
    neural modeling for large corpus item recommendations", algorithm 2, which counts an item once per step, however
    often it occurs in it. After its first occurrence, an item is taken for one of average frequency, unless it was met
    sooner than that.

    Args:
        num_items: I, items of the corpus.
        rate: weight of the newest gap in the moving average.
    """

    _last: torch.Tensor  # step after the newest occurrence; 0: none
    _gap: torch.Tensor  # mean steps per occurrence; below 0: minus the guess after the first occurrence; 0: none

    def __init__(self, num_items: int, rate: float = 0.05) -> None:
        super().__init__()
        self.num_items, self.rate = num_items, rate
        self.register_buffer("_last", torch.zeros(num_items, dtype=torch.int64))
        self.register_buffer("_gap", torch.zeros(num_items))

    def log_q(self, ids: torch.Tensor, all_ids: torch.Tensor, step: int) -> torch.Tensor:
        """See `KnownFrequency.log_q`. In training, updates the estimate with the occurrences of this step first."""
        average = max(self.num_items / max(len(all_ids), 1), 1.0)
        if self.training:
            seen, counts = all_ids.unique(return_counts=True)
            last, mean = self._last[seen], self._gap[seen]
            gap = (step + 1 - last).float()
            # The gap belongs to all occurrences of the step. Dividing by the count that the mean predicts (of a Poisson
            # distribution, given that there is one) keeps the weight of a step at `rate`, whatever the frequency.
            predicted = 1 / (mean * -torch.expm1(-1 / mean.clamp(min=1e-6))).clamp(min=1e-6)
            weight = (self.rate * counts / predicted).clamp(max=1.0)
            known = torch.lerp(mean, gap / counts, weight)
            first = -gap.clamp(max=average) / counts
            self._gap[seen] = torch.where(mean > 0, known, torch.where(last > 0, gap / counts, first))
            self._last[seen] = step + 1
        gaps = self._gap[ids].abs()
        return -torch.where(gaps > 0, gaps, average).log()


def _generator(seed: int, step: int) -> torch.Generator:
    """A generator on the CPU, so that all devices draw the same numbers."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step * 7_919 + 1) % (1 << 63))
