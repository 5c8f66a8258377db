"""Negative samplers, and expected item counts q per batch, whose log corrects the scores.

A sampler draws the same ids on every rank. They depend only on the seed and the step, so a resumed run, also with
another number of ranks, draws the same ids.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from rayrec.models.corpus import Corpus


class UniformSampler(nn.Module):
    """Draws `count` items uniformly, with replacement.

    Attributes:
        corpus: the items.
    """

    def __init__(self, num_items: int, count: int, seed: int) -> None:
        super().__init__()
        self.corpus, self.count, self.seed = Corpus(num_items), count, seed

    def draw(self, step: int) -> torch.Tensor:
        """Returns the ids `[count]` of the candidates of `step` on the host; identical on every rank."""
        items = torch.randint(len(self.corpus), (self.count,), generator=_generator(self.seed, step))
        return self.corpus.rows(items)

    def log_q(self, ids: torch.Tensor) -> torch.Tensor:
        """Returns the log of the expected count of each id in a draw."""
        return torch.full((len(ids),), math.log(self.count / len(self.corpus)), device=ids.device)


class PopularitySampler(nn.Module):
    """Draws `count` items with replacement, with a probability proportional to their counts to the power of `power`.

    Args:
        num_items: I, rows of the item table.
        count: items to draw.
        power: 1: as in the data; 0: uniform.
        kept: the counts are part of the state.
    """

    _weights: torch.Tensor
    corpus: Corpus

    def __init__(self, num_items: int, count: int, seed: int, power: float = 1.0, kept: bool = False) -> None:
        super().__init__()
        self.corpus, self.count, self.seed, self.power = Corpus(num_items), count, seed, power
        self.register_buffer("_weights", torch.zeros(num_items, dtype=torch.float64), persistent=kept)
        self._cumulated: torch.Tensor | None = None  # on the host
        self._total: torch.Tensor | None = None  # `total`, kept while `_cumulated` is

    @property
    def total(self) -> torch.Tensor:
        """Sum of the weights of items, 0 without counts."""
        return self._of_items().sum()

    def set_counts(self, counts_I: torch.Tensor) -> None:
        """Sets the count of each item."""
        counts = counts_I.to(self._weights)
        self._weights.copy_(torch.where(counts > 0, counts**self.power, 0.0))
        self._cumulated = self._total = None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._cumulated = self._total = None

    def draw(self, step: int) -> torch.Tensor:
        """See `UniformSampler.draw`. Waits for the device after the counts have changed."""
        if self._cumulated is None:
            weights = self._of_items()
            sums = weights.cpu().cumsum(0)
            self._cumulated, self._total = sums / sums[-1], weights.sum()
        uniform = torch.rand(self.count, generator=_generator(self.seed, step), dtype=torch.float64)
        places = torch.searchsorted(self._cumulated, uniform, right=True)
        return self.corpus.rows(places.clamp(max=len(self._cumulated) - 1))

    def log_q(self, ids: torch.Tensor) -> torch.Tensor:
        """See `UniformSampler.log_q`."""
        total = self.total if self._total is None or self._total.device != ids.device else self._total
        return (self._weights[ids] / total * self.count).clamp(min=1e-12).log().float()

    def _of_items(self) -> torch.Tensor:
        return self._weights[self.corpus.all_rows(self._weights.device)]


SAMPLERS = ("uniform", "popularity")


class KnownFrequency(nn.Module):
    """Expected count of an item among the candidates of a step, from its count in the training data.

    Args:
        num_items: I, rows of the item table.
        kept: the counts are part of the state.
    """

    _counts: torch.Tensor
    corpus: Corpus

    def __init__(self, num_items: int, kept: bool = False) -> None:
        super().__init__()
        self.corpus = Corpus(num_items)
        self.register_buffer("_counts", torch.zeros(num_items, dtype=torch.float64), persistent=kept)

    @property
    def total(self) -> torch.Tensor:
        """Sum of all counts, 0 if they are not set."""
        return self._counts.sum()

    def set_counts(self, counts_I: torch.Tensor) -> None:
        """Sets the count of each item."""
        self._counts.copy_(counts_I)

    def log_q(
        self,
        ids: torch.Tensor,
        all_ids: torch.Tensor,
        step: int,
        met: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Returns `[len(ids)]`; `all_ids` are the candidates of all ranks, `met` their distinct ids and counts."""
        share = self._counts[ids].clamp(min=0.5) / self.total  # an item with count 0 may still occur
        return (share * max(len(all_ids), 1)).log().float()


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

    corpus: Corpus
    _last: torch.Tensor  # step after the newest occurrence; 0: none
    _gap: torch.Tensor  # mean steps per occurrence; below 0: minus the guess after the first occurrence; 0: none

    def __init__(self, num_items: int, rate: float = 0.05) -> None:
        super().__init__()
        self.corpus, self.rate = Corpus(num_items), rate
        self.register_buffer("_last", torch.zeros(num_items, dtype=torch.int64))
        self.register_buffer("_gap", torch.zeros(num_items))

    def renew(self, rows: torch.Tensor) -> None:
        """Forgets the estimate of items."""
        rows = rows.to(self._last.device)
        self._last[rows], self._gap[rows] = 0, 0.0

    def log_q(
        self,
        ids: torch.Tensor,
        all_ids: torch.Tensor,
        step: int,
        met: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """See `KnownFrequency.log_q`. In training, updates the estimate with the occurrences of this step first."""
        average = max(len(self.corpus) / max(len(all_ids), 1), 1.0)
        if self.training:
            seen, counts = all_ids.unique(return_counts=True) if met is None else met
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
