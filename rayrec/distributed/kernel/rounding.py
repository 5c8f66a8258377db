"""Stochastic rounding: an update smaller than the step between two numbers of 16 bits moves a weight now and then, so
that many of them move it as far as they would in float32 (Gupta et al. 2015)."""

from __future__ import annotations

import torch

# bits of a float32's mantissa that the format does not keep
_DROPPED_BITS = {torch.bfloat16: 16, torch.float16: 13}


def rounded(numbers: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """`numbers` in `dtype`, up or down with the probability that keeps the mean.

    The same numbers and seed give the same result on every rank of a kind of device, so replicas stay alike.

    Args:
        numbers: float32.
        dtype: float16, bfloat16, or float32, to which nothing is rounded.
        seed: of what is drawn, another one in each step.
    """
    dropped = _DROPPED_BITS.get(dtype)
    if dropped is None:
        return numbers.to(dtype)
    generator = torch.Generator(device=numbers.device).manual_seed(seed)
    noise = torch.randint(0, 1 << dropped, numbers.shape, dtype=torch.int32, device=numbers.device, generator=generator)
    bits = numbers.contiguous().view(torch.int32)
    cut = ((bits + noise) >> dropped) << dropped
    return torch.where(numbers.isfinite(), cut.view(torch.float32), numbers).to(dtype)
