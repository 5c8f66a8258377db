"""`ItemFeatures`, what a retriever knows of items beside their ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass(frozen=True, slots=True)
class ItemFeatures:
    """Features of I items.

    Args:
        dense: float32 `[I, N]`.
        ids: of each sparse feature, table rows `[n]` and offsets `[I + 1]`.
    """

    dense: torch.Tensor
    ids: Mapping[str, tuple[torch.Tensor, torch.Tensor]]

    @classmethod
    def joined(cls, parts: Sequence[ItemFeatures]) -> ItemFeatures:
        """The items of all parts, one after the other; there must be one."""
        ids = {}
        for name in parts[0].ids:
            lengths = torch.cat([part.ids[name][1].diff() for part in parts])
            ids[name] = (torch.cat([part.ids[name][0] for part in parts]), F.pad(lengths.cumsum(0), (1, 0)))
        return cls(torch.cat([part.dense for part in parts]), ids)

    def taken(self, items: torch.Tensor) -> ItemFeatures:
        """The features of some items `[C]`, in this order; -1 stands for an item without features."""
        has, places = items >= 0, items.clamp(min=0)
        dense = self.dense[places] * has[:, None]
        return ItemFeatures(dense, {name: _taken(*lists, places, has) for name, lists in self.ids.items()})

    def to(self, device: torch.device) -> ItemFeatures:
        ids = {name: (values.to(device), offsets.to(device)) for name, (values, offsets) in self.ids.items()}
        return ItemFeatures(self.dense.to(device), ids)


def _taken(
    values: torch.Tensor, offsets: torch.Tensor, places: torch.Tensor, has: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The lists at some places, empty where `has` is False."""
    starts = offsets[places]
    lengths = (offsets[places + 1] - starts) * has
    taken = F.pad(lengths.cumsum(0), (1, 0))
    steps = torch.arange(int(taken[-1]), device=values.device)
    return values[steps + (starts - taken[:-1]).repeat_interleave(lengths)], taken
