"""Bags out of the vectors of distinct ids, on the rank that wants them; autograd carries gradients to vectors and
weights. Nothing is sent here."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rayrec.distributed.sharding.routing import Routes
from rayrec.sparse import ops


@dataclass(frozen=True)
class DistinctBags:
    """A batch's bags, feature after feature.

    Args:
        places: for each id, its place among the distinct ids of all features.
        lengths_FB: ids of each bag.
        counts_F: distinct ids of each feature.
        weights: of each id, or None.
    """

    places: torch.Tensor
    lengths_FB: torch.Tensor
    counts_F: torch.Tensor
    weights: torch.Tensor | None


@dataclass(frozen=True)
class _Width:
    """The outputs of one width; their vectors make one matrix, output after output."""

    dim: int
    outputs: list[int]
    features: torch.Tensor  # int64, of each output
    natural: bool  # each feature once, in order


class LocalPooling:
    """Adds up vectors bag by bag, with one operator a width.

    Args:
        routes: of the collection.
        device: where vectors lie.
    """

    def __init__(self, routes: Routes, device: torch.device) -> None:
        place = {feature: number for number, feature in enumerate(routes.features)}
        features = [place[output.feature] for output in routes.outputs]
        by_dim: dict[int, list[int]] = {}
        for number, output in enumerate(routes.outputs):
            by_dim.setdefault(output.dim, []).append(number)
        self._widths = []
        for dim, outputs in by_dim.items():
            read = [features[number] for number in outputs]
            index = torch.tensor(read, dtype=torch.int64, device=device)
            self._widths.append(_Width(dim, outputs, index, read == list(range(len(place)))))
        self._features = torch.tensor(features, dtype=torch.int64, device=device)
        self._dims = torch.tensor([output.dim for output in routes.outputs], dtype=torch.int64, device=device)

    def pool(self, rows: torch.Tensor, bags: DistinctBags, factors_BE: torch.Tensor | None) -> torch.Tensor:
        """The bags `[B, total width]`, output after output.

        Args:
            rows: the distinct ids' vectors, output after output; of any width that divides all dims.
            bags: which of them each bag holds.
            factors_BE: a factor for each bag, or None.
        """
        pooled: dict[int, torch.Tensor] = {}
        for width, vectors in zip(self._widths, self._by_width(rows, bags), strict=True):
            sums_BED = _sums(width, vectors, bags).transpose(0, 1)
            if factors_BE is not None:
                sums_BED = sums_BED * factors_BE[:, width.outputs, None]
            if len(self._widths) == 1:
                return sums_BED.reshape(sums_BED.shape[0], len(width.outputs) * width.dim)
            pooled.update(zip(width.outputs, sums_BED.unbind(1), strict=True))
        return torch.cat([pooled[number] for number in range(len(pooled))], dim=1)

    def _by_width(self, rows: torch.Tensor, bags: DistinctBags) -> list[torch.Tensor]:
        """For each width its outputs' vectors `[N, D]`."""
        if len(self._widths) == 1:
            return [rows]
        blocks = rows.view(-1).split((bags.counts_F[self._features] * self._dims).tolist())
        return [torch.cat([blocks[number] for number in width.outputs]).view(-1, width.dim) for width in self._widths]


def _sums(width: _Width, vectors: torch.Tensor, bags: DistinctBags) -> torch.Tensor:
    """`[E, B, D]`: for each output of the width its bags' sums."""
    lengths, places, weights = bags.lengths_FB, bags.places, bags.weights
    if not width.natural:
        order = width.features.to(torch.int32)
        lengths, places, weights = ops.permute_segments(order, lengths, places, weights)
        counts_E = bags.counts_F[width.features]
        first_F = bags.counts_F.cumsum(0) - bags.counts_F
        shifts_E = counts_E.cumsum(0) - counts_E - first_F[width.features]
        places = places + shifts_E.repeat_interleave(lengths.sum(1), output_size=places.numel())
    sums = F.embedding_bag(
        places,
        vectors,
        ops.complete_cumsum(lengths.reshape(-1).to(torch.int64)),
        mode="sum",
        per_sample_weights=None if weights is None else weights.to(vectors.dtype),
        include_last_offset=True,
    )
    return sums.view(len(width.outputs), lengths.shape[1], width.dim)
