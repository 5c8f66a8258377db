"""What the scripts share and either package may run: numbers that depend on their place alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn


def fill(model: nn.Module) -> nn.Module:
    """The same first weights under both packages."""
    with torch.no_grad():
        for place, (_, weight) in enumerate(sorted(model.named_parameters())):
            numbers = torch.arange(weight.numel(), dtype=torch.float32).view(weight.shape)
            weight.copy_(torch.sin(numbers * 0.37 + place) / 3)
    return model


def draws(
    features: dict[str, int], batch: int, steps: int, dense: int = 0, rank: int = 0
) -> Iterator[tuple[torch.Tensor, ...]]:
    """(dense [B, N], ids, lengths [F * B], labels [B]) of each step.

    Args:
        features: how many rows each has.
        dense: N.
        rank: of the process, which draws its own.
    """
    numbers = torch.Generator().manual_seed(7 + rank)
    for _ in range(steps):
        lengths = torch.randint(0, 4, (len(features) * batch,), generator=numbers)
        counts = lengths.view(len(features), batch).sum(1).tolist()
        drawn = zip(features.values(), counts, strict=True)
        ids = torch.cat([torch.randint(rows, (count,), generator=numbers) for rows, count in drawn])
        numbers_BN = torch.rand(batch, dense, generator=numbers)
        yield numbers_BN, ids, lengths, torch.randint(2, (batch,), generator=numbers)
