"""Normalization of layer outputs, over the examples of a step on all ranks or over the units of an example."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn


class BatchNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps), times a weight plus a bias for each unit (Ioffe & Szegedy 2015).

    Training uses the mean and variance over the examples of all ranks, so that the result does not depend on their
    number; evaluation and exports use running averages. With micro-batches, the statistics are those of a micro-batch.

    Args:
        shape: Shape of an example, `(units,)` or `(experts, units)`.
        affine: Whether there are a weight and a bias.
        momentum: Share of the newest step in the running averages.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(
        self,
        shape: tuple[int, ...],
        affine: bool = True,
        eps: float = 1e-5,
        momentum: float = 0.1,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.momentum = eps, momentum
        self.weight = nn.Parameter(torch.ones(shape, device=device)) if affine else None
        self.bias = nn.Parameter(torch.zeros(shape, device=device)) if affine else None
        self.register_buffer("running_mean", torch.zeros(shape, device=device))
        self.register_buffer("running_var", torch.ones(shape, device=device))
        # A differentiable sum over ranks. `Ranker.on_sharded` sets it, since modules know nothing of ranks.
        self.sum_over_ranks: Callable[[torch.Tensor], torch.Tensor] = _this_rank

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, *shape]` to `[B, *shape]`; B may be 0 on some ranks."""
        mean, var = self._statistics(inputs) if self.training else (self.running_mean, self.running_var)
        normed = (inputs - mean) * (var + self.eps).rsqrt()
        return normed if self.weight is None or self.bias is None else normed * self.weight + self.bias

    def _statistics(self, inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Mean and biased variance of the step, which also enter the running averages."""
        # The variance is a difference of large sums, hence float64.
        values = inputs.double()
        rows = values.new_full((1, *values.shape[1:]), values.shape[0])
        sums = self.sum_over_ranks(torch.cat([values.sum(0)[None], values.square().sum(0)[None], rows]))
        count = sums[2].detach().clamp(min=1)
        mean = sums[0] / count
        var = (sums[1] / count - mean.square()).clamp(min=0)
        with torch.no_grad():
            share = self.momentum * (sums[2] > 0)  # a step without examples changes nothing
            self.running_mean += (share * (mean - self.running_mean)).to(self.running_mean)
            unbiased = var * count / (count - 1).clamp(min=1)
            self.running_var += (share * (unbiased - self.running_var)).to(self.running_var)
        return mean.to(inputs.dtype), var.to(inputs.dtype)


def _this_rank(sums: torch.Tensor) -> torch.Tensor:
    return sums


class LayerNorm(nn.Module):
    """Layer normalization of the last dimension, with a weight and a bias for each unit of each expert.

    Args:
        shape: Shape of an example, `(units,)` or `(experts, units)`.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device | str | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(shape, device=device))
        self.bias = nn.Parameter(torch.zeros(shape, device=device))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """`[B, *shape]` to `[B, *shape]`."""
        return F.layer_norm(inputs, inputs.shape[-1:]) * self.weight + self.bias


NORMS: dict[str, Callable[[tuple[int, ...], torch.device | str | None], nn.Module]] = {
    "batch": lambda shape, device: BatchNorm(shape, device=device),
    "layer": lambda shape, device: LayerNorm(shape, device=device),
}
