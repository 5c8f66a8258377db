"""Bags out of the vectors of distinct ids, on the rank that wants them, and gradients the other way. Nothing is sent
here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from rayrec.distributed.kernel import RowGroups
from rayrec.distributed.sharding.routing import Routes
from rayrec.distributed.sharding.sequence_dedup import Duplicates
from rayrec.sparse import ops


@dataclass(frozen=True)
class WidthBags:
    """A batch's bags of the outputs of one width, output after output.

    Args:
        places: for each id the place of its vector among those of the width's outputs.
        offsets: where each bag begins; one more at the end.
        weights: of each id, or None.
        groups: which ids are the same.
        batch: examples.
    """

    places: torch.Tensor
    offsets: torch.Tensor
    weights: torch.Tensor | None
    groups: RowGroups
    batch: int


@dataclass(frozen=True)
class Bags:
    """A batch's bags by width, and how many numbers the distinct vectors of each output have (of one width: unused)."""

    widths: tuple[WidthBags, ...]
    block_sizes: list[int]


@dataclass(frozen=True)
class PooledBatch:
    """A batch's bags, and a factor for each of them or None."""

    bags: Bags
    factors_BE: torch.Tensor | None


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
    """

    def __init__(self, routes: Routes) -> None:
        place = {feature: number for number, feature in enumerate(routes.features)}
        features = [place[output.feature] for output in routes.outputs]
        by_dim: dict[int, list[int]] = {}
        for number, output in enumerate(routes.outputs):
            by_dim.setdefault(output.dim, []).append(number)
        self._widths = []
        for dim, outputs in by_dim.items():
            read = [features[number] for number in outputs]
            index = torch.tensor(read, dtype=torch.int64)
            self._widths.append(_Width(dim, outputs, index, read == list(range(len(place)))))
        self._features = torch.tensor(features, dtype=torch.int64)
        self._dims = torch.tensor([output.dim for output in routes.outputs], dtype=torch.int64)

    def prepare(
        self, duplicates: Duplicates, lengths_FB: torch.Tensor, counts_F: torch.Tensor, weights: torch.Tensor | None
    ) -> Bags:
        """Host work: which vectors each bag adds up.

        Args:
            duplicates: which ids are the same.
            lengths_FB: ids of each bag, feature after feature.
            counts_F: distinct ids of each feature.
            weights: of each id, or None.
        """
        sizes = [] if len(self._widths) == 1 else (counts_F[self._features] * self._dims).tolist()
        widths = tuple(_width_bags(width, duplicates, lengths_FB, counts_F, weights) for width in self._widths)
        return Bags(widths, sizes)

    def pool(self, rows: torch.Tensor, batch: PooledBatch) -> torch.Tensor:
        """The bags `[B, total width]`, output after output.

        Args:
            rows: the distinct ids' vectors, output after output; of any width that divides all dims.
            batch: which of them each bag holds.
        """
        factors_BE = batch.factors_BE
        pooled: dict[int, torch.Tensor] = {}
        for width, bags, vectors in zip(self._widths, batch.bags.widths, self._by_width(rows, batch.bags), strict=True):
            weights = None if bags.weights is None else bags.weights.to(vectors.dtype)
            sums: torch.Tensor = _Sums.apply(vectors, weights, bags.places, bags.offsets, bags.groups)
            sums_BED = sums.view(len(width.outputs), bags.batch, width.dim).transpose(0, 1)
            if factors_BE is not None:
                picked = factors_BE if len(self._widths) == 1 else torch.stack(_picked(factors_BE, width.outputs), 1)
                sums_BED = sums_BED * picked[:, :, None]
            if len(self._widths) == 1:
                return sums_BED.reshape(sums_BED.shape[0], len(width.outputs) * width.dim)
            pooled.update(zip(width.outputs, sums_BED.unbind(1), strict=True))
        return torch.cat([pooled[number] for number in range(len(pooled))], dim=1)

    def _by_width(self, rows: torch.Tensor, bags: Bags) -> list[torch.Tensor]:
        """For each width its outputs' vectors `[N, D]`."""
        if len(self._widths) == 1:
            return [rows]
        blocks = rows.view(-1).split(bags.block_sizes)
        return [torch.cat([blocks[number] for number in width.outputs]).view(-1, width.dim) for width in self._widths]


def _picked(factors_BE: torch.Tensor, outputs: list[int]) -> list[torch.Tensor]:
    return [factors_BE[:, number] for number in outputs]


def _width_bags(
    width: _Width,
    duplicates: Duplicates,
    lengths_FB: torch.Tensor,
    counts_F: torch.Tensor,
    weights: torch.Tensor | None,
) -> WidthBags:
    lengths_EB, places, groups = lengths_FB, duplicates.inverse, duplicates.groups
    if not width.natural:
        order = width.features.to(torch.int32)
        lengths_EB, places, weights = ops.permute_segments(order, lengths_FB, places, weights)
        places, groups = _moved(width, places, duplicates, counts_F)
    offsets = ops.complete_cumsum(lengths_EB.reshape(-1).to(torch.int64))
    return WidthBags(places, offsets, weights, groups, lengths_EB.shape[1])


def _moved(
    width: _Width, picked: torch.Tensor, duplicates: Duplicates, counts_F: torch.Tensor
) -> tuple[torch.Tensor, RowGroups]:
    """Places and groups counted from the first id and vector of the width's outputs.

    Args:
        picked: places among the distinct ids of all features, for each id of the outputs.
    """
    order, groups = width.features.to(torch.int32), duplicates.groups
    ids_F, counts_F = duplicates.lengths_F.to(torch.int64), counts_F.to(torch.int64)
    ids_E, counts_E = ids_F[width.features], counts_F[width.features]

    def shift(numbers: torch.Tensor, sizes_F: torch.Tensor, repeats_E: torch.Tensor) -> torch.Tensor:
        """Numbers that were counted over all features, now over the outputs."""
        sizes_E = sizes_F[width.features]
        shifts_E = sizes_E.cumsum(0) - sizes_E - (sizes_F.cumsum(0) - sizes_F)[width.features]
        return numbers + shifts_E.repeat_interleave(repeats_E, output_size=numbers.numel())

    moved_order = shift(ops.permute_chunks(order, ids_F, groups.order), ids_F, ids_E)
    starts = shift(ops.permute_chunks(order, counts_F, groups.starts), ids_F, counts_E)
    return shift(picked, counts_F, ids_E), RowGroups(torch.arange(starts.numel()), moved_order, starts)


class _Sums(torch.autograd.Function):
    """`F.embedding_bag`, whose backward needs no sort of its own: the ids' groups are known."""

    @staticmethod
    def forward(
        ctx: Any,
        vectors: torch.Tensor,
        weights: torch.Tensor | None,
        places: torch.Tensor,
        offsets: torch.Tensor,
        groups: RowGroups,
    ) -> torch.Tensor:
        ctx.save_for_backward(vectors, weights, places, offsets)
        ctx.groups = groups
        return _bags(vectors, weights, places, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        vectors, weights, places, offsets = ctx.saved_tensors
        grad, weight_grad = grads[0].contiguous(), None
        if ctx.needs_input_grad[1]:
            with torch.enable_grad():
                leaf = weights.detach().requires_grad_()
                (weight_grad,) = torch.autograd.grad(_bags(vectors.detach(), leaf, places, offsets), leaf, grad)
        lengths = offsets[1:] - offsets[:-1]
        bag_of_id = torch.arange(lengths.numel(), device=offsets.device).repeat_interleave(
            lengths, output_size=places.numel()
        )
        return ctx.groups.sum(grad, bag_of_id, weights), weight_grad, None, None, None


def _bags(
    vectors: torch.Tensor, weights: torch.Tensor | None, places: torch.Tensor, offsets: torch.Tensor
) -> torch.Tensor:
    return F.embedding_bag(places, vectors, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True)
