"""`ItemFeatures`, what a retriever knows of items beside their ids, and `ItemInputs`, what its model reads of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.modules.pooling import pool_mean


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


class ItemInputs(nn.Module):
    """What a model reads of items beside their ids: the mean vectors of sparse features, and dense ones.

    Args:
        model: name of the model, for messages.
        names: its `item_features`.
        item: the feature with item ids.
        features: all sparse features.
        dense_names: the feature of each dense column.
        dim: width of the tables.

    Raises:
        ValueError: an item feature is unknown.
    """

    def __init__(
        self,
        model: str,
        names: Sequence[str],
        *,
        item: str,
        features: Sequence[str],
        dense_names: Sequence[str],
        dim: int,
    ) -> None:
        super().__init__()
        known = {*features, *dense_names} - {item}
        for name in names:
            if name not in known:
                raise ValueError(f"{model}: item_features has {name!r}; the features are {', '.join(sorted(known))}")
        self.sparse = tuple(name for name in features if name in names)
        self.dense_columns = tuple(place for place, name in enumerate(dense_names) if name in names)
        self.width = dim * len(self.sparse) + len(self.dense_columns)

    def ids(self, features: ItemFeatures) -> dict[str, torch.Tensor]:
        """The ids of each sparse feature."""
        return {name: features.ids[name][0] for name in self.sparse}

    def lengths(self, features: ItemFeatures) -> dict[str, torch.Tensor]:
        """The number of ids of each item `[C]`, by sparse feature."""
        return {name: features.ids[name][1].diff() for name in self.sparse}

    def dense(self, features: ItemFeatures) -> torch.Tensor | None:
        """The dense features `[C, n]`; None if the model reads none."""
        return features.dense if self.dense_columns else None

    def forward(
        self, vectors: Mapping[str, torch.Tensor], lengths: Mapping[str, torch.Tensor], dense: torch.Tensor | None
    ) -> list[torch.Tensor]:
        """The inputs `[C, n]`, together of `width`.

        Args:
            vectors: of the ids of each sparse feature.
            lengths: `[C]`, of each sparse feature.
            dense: `[C, n]`, or None without dense features.
        """
        pooled = [pool_mean(vectors[name], lengths[name]) for name in self.sparse]
        return pooled if dense is None else [*pooled, dense]


def lengths_of(feature: str) -> str:
    """Name in `Prepared.index` of the number of ids that each item has in a feature."""
    return f"lengths of {feature}"
