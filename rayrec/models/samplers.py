"""Samplers of negatives, and how often an item is met in a batch: ids, and the log of the expected count q of each.

A sampler draws for all ranks together: the same ids on every rank, decided by its seed and the step alone, so that a
run that is resumed, or goes on with another number of ranks, draws what it would have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Drawn:
    """Candidates of a step: ids `[C]`, and `[C]` the log of how often each is expected among them."""

    ids: torch.Tensor
    log_q: torch.Tensor


class UniformSampler(nn.Module):
    """`count` of the items, each as likely, with repetition."""

    def __init__(self, num_items: int, count: int, seed: int) -> None:
        super().__init__()
        self.num_items, self.count, self.seed = num_items, count, seed

    def draw(self, step: int, device: torch.device) -> Drawn:
        """What step `step` meets, on any rank."""
        ids = torch.randint(self.num_items, (self.count,), generator=_generator(self.seed, step)).to(device)
        return Drawn(ids, self.log_q(ids))

    def log_q(self, ids: torch.Tensor) -> torch.Tensor:
        """The log of each id's expected count in a draw."""
        return torch.full((len(ids),), self.count / self.num_items, device=ids.device).log()


class PopularitySampler(nn.Module):
    """`count` of the items, each as likely as its count to the power of `power`.

    Args:
        counts: of each item, by id.
        power: 1: as in the data; 0: uniform.
    """

    _cumulated: torch.Tensor
    _log_expected: torch.Tensor

    def __init__(self, counts: Sequence[float] | torch.Tensor, count: int, seed: int, power: float = 1.0) -> None:
        super().__init__()
        weights = torch.as_tensor(counts, dtype=torch.float64) ** power
        if not float(weights.sum()) > 0:
            raise ValueError("popularity sampler: counts must have a number above 0")
        share = weights / weights.sum()
        self.count, self.seed = count, seed
        self.register_buffer("_cumulated", share.cumsum(0), persistent=False)
        self.register_buffer("_log_expected", (share * count).clamp(min=1e-12).log().float(), persistent=False)

    def draw(self, step: int, device: torch.device) -> Drawn:
        """As of `UniformSampler`."""
        places = torch.rand(self.count, generator=_generator(self.seed, step), dtype=torch.float64).to(device)
        ids = torch.searchsorted(self._cumulated, places, right=True).clamp(max=len(self._cumulated) - 1)
        return Drawn(ids, self.log_q(ids))

    def log_q(self, ids: torch.Tensor) -> torch.Tensor:
        """As of `UniformSampler`."""
        return self._log_expected[ids]


SAMPLERS: dict[str, Callable[..., UniformSampler | PopularitySampler]] = {
    "uniform": UniformSampler,
    "popularity": PopularitySampler,
}


class KnownFrequency(nn.Module):
    """How often an item is expected among the positives of a step, from its count in the training data."""

    _log_share: torch.Tensor

    def __init__(self, counts: Sequence[float] | torch.Tensor) -> None:
        super().__init__()
        numbers = torch.as_tensor(counts, dtype=torch.float64)
        share = numbers.clamp(min=0.5) / numbers.sum()  # an item that was never counted may still be met
        self.register_buffer("_log_share", share.log().float(), persistent=False)

    def log_q(self, ids: torch.Tensor, all_ids: torch.Tensor, step: int) -> torch.Tensor:
        """`[len(ids)]`, for the positives `all_ids` of all ranks."""
        return self._log_share[ids] + torch.tensor(float(max(len(all_ids), 1)), device=ids.device).log()


class StreamingFrequency(nn.Module):
    """The same, estimated while training from the mean number of steps between two sights of an item (Yi et al. 2019,
    "Sampling-bias-corrected neural modeling for large corpus item recommendations", algorithm 2).

    Args:
        rate: weight of the newest gap in the mean.
    """

    _last: torch.Tensor
    _gap: torch.Tensor

    def __init__(self, num_items: int, rate: float = 0.05) -> None:
        super().__init__()
        self.rate = rate
        self.register_buffer("_last", torch.zeros(num_items, dtype=torch.int64))
        self.register_buffer("_gap", torch.zeros(num_items))

    def log_q(self, ids: torch.Tensor, all_ids: torch.Tensor, step: int) -> torch.Tensor:
        """As of `KnownFrequency`; counts the sights of this step first."""
        seen = all_ids.unique()
        gap = (step + 1 - self._last[seen]).float()
        known = self._gap[seen]
        self._gap[seen] = torch.where(known > 0, (1 - self.rate) * known + self.rate * gap, gap)
        self._last[seen] = step + 1
        return -self._gap[ids].clamp(min=1.0).log()


def _generator(seed: int, step: int) -> torch.Generator:
    """On the host, so that all devices draw the same."""
    return torch.Generator().manual_seed((seed * 1_000_003 + step * 7_919 + 1) % (1 << 63))
