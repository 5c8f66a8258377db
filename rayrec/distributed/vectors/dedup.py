"""Deduplication: sends each distinct id of a rank's batch once, and expands the vectors that come back.

One vector travels for each distinct id, and no weights, instead of one vector per id or per bag (and row block that the
bag reads). This sends less if ids repeat often: with few rows, very skewed ids, or large batches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from rayrec.distributed.ids.batch import Ids
from rayrec.distributed.ids.input_dist import FeatureOrder
from rayrec.distributed.ids.routes import Routes
from rayrec.distributed.ids.upload import OnHost
from rayrec.distributed.kernel.rows import DistinctRows
from rayrec.distributed.vectors.pooled_exchange import MeanScale
from rayrec.modules.configs import BaseEmbeddingConfig, EmbeddingBagConfig
from rayrec.modules.pooling import row_of
from rayrec.sparse import KeyedJaggedTensor, ops

# Below this share of distinct ids, deduplication is faster (`python jobs/bench/dedup.py`).
MOST_DISTINCT = 0.6
# Of all ids, one in 2^_SAMPLE_BITS is counted; too few say little.
_SAMPLE_BITS, _FEW_IDS = 4, 1024


@dataclass(frozen=True)
class WidthIds:
    """A batch's ids in the outputs of one width, output after output.

    Args:
        positions: for each id the position of its vector among the vectors of these outputs.
        offsets: start of each bag, and the end of the last; None for one vector per id.
        weights: weight of each id, or None.
        groups: the ids grouped by vector.
    """

    positions: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    groups: DistinctRows


@dataclass(frozen=True)
class DistinctIds:
    """A batch's own ids.

    Args:
        widths: the ids of the outputs of each width.
        counts_O, ids_O: number of distinct ids, and of ids, of each output.
        factors_BO: factor of each bag, or None.
    """

    widths: tuple[WidthIds, ...]
    counts_O: OnHost[torch.Tensor]
    ids_O: OnHost[torch.Tensor]
    factors_BO: torch.Tensor | None


@dataclass(frozen=True)
class _Width:
    """The outputs of one width; their vectors form one matrix, output after output."""

    dim: int
    outputs: list[int]
    features: torch.Tensor  # int64, of each output
    reads_each_once: bool  # each feature once, in order


class Distinct:
    """Extracts distinct ids, and expands their vectors, with one operator per width.

    Args:
        tables: tables of the collection.
        weighted: whether ids carry weights.
        routes: routes of the collection.
    """

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], weighted: bool, routes: Routes) -> None:
        self._keys = list(routes.features)
        self._features = FeatureOrder(routes.features, weighted)
        rows = [max(table.num_embeddings for table in tables if key in table.feature_names) for key in self._keys]
        # Each feature's ids get a range of their own, so that one pass finds the distinct ids of all features.
        self._edges = torch.tensor([0, *accumulate(rows)], dtype=torch.int64)
        self._scale = MeanScale(tables, routes.outputs) if isinstance(tables[0], EmbeddingBagConfig) else None
        features = [self._keys.index(output.feature) for output in routes.outputs]
        dims = [output.dim for output in routes.outputs]
        self._features_O, self._dims_O = torch.tensor(features), torch.tensor(dims)
        self._widths = []
        for dim in dict.fromkeys(dims):
            outputs = [number for number, width in enumerate(dims) if width == dim]
            read = [features[number] for number in outputs]
            self._widths.append(_Width(dim, outputs, torch.tensor(read), read == list(range(len(self._keys)))))

    def pays(self, kjt: KeyedJaggedTensor) -> bool:
        """Whether so few ids of a batch are distinct that deduplication pays.

        Counts ids with certain hashes, and all occurrences of these. The result depends on the batch alone, so a
        resumed run decides as it would have without the interruption.
        """
        # Multiplication by 2^64 / golden ratio moves what differs between ids to the upper bits (Fibonacci hashing).
        hashes = kjt.values().to(torch.int64) * -7046029254386353131
        positions = (hashes >> (64 - _SAMPLE_BITS) == 0).nonzero().view(-1)
        feature = torch.searchsorted(torch.tensor(kjt.offset_per_key()[1:]), positions, right=True)
        counted = torch.tensor([key in self._keys for key in kjt.keys()])[feature]
        keys = kjt.values()[positions[counted]].to(torch.int64) * len(kjt.keys()) + feature[counted]
        return keys.numel() >= _FEW_IDS >> _SAMPLE_BITS and keys.unique().numel() < MOST_DISTINCT * keys.numel()

    def extract(self, kjt: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, DistinctIds]:
        """The distinct ids of each feature, ascending, as one example; and the data for `expand`. Every id must be
        inside its table."""
        ids = self._features.of(kjt)
        lengths_F, starts_F = ids.lengths.sum(1), self._edges[:-1]
        groups = DistinctRows.of(ids.values + starts_F.repeat_interleave(lengths_F, output_size=ids.values.numel()))
        distinct = groups.distinct
        counts_F = torch.searchsorted(distinct, self._edges).diff()
        rows = distinct - starts_F.repeat_interleave(counts_F, output_size=distinct.numel())
        positions = Ids(ids.lengths, _inverse(groups), ids.weights)
        own = DistinctIds(
            tuple(self._ids_of(width, positions, groups, counts_F) for width in self._widths),
            OnHost(counts_F[self._features_O]),
            OnHost(lengths_F[self._features_O]),
            None if self._scale is None else self._scale.of(kjt),
        )
        return KeyedJaggedTensor(self._keys, rows, lengths=counts_F, stride=1), own

    def _ids_of(self, width: _Width, positions: Ids, groups: DistinctRows, counts_F: torch.Tensor) -> WidthIds:
        if not width.reads_each_once:
            order, features = width.features.to(torch.int32), width.features
            lengths, moved, weights = ops.permute_segments(
                order, positions.lengths, positions.values, positions.weights
            )
            # From positions among all features' distinct ids to positions among the vectors of this width.
            counts = counts_F[features]
            shifts = counts.cumsum(0) - counts - (counts_F.cumsum(0) - counts_F)[features]
            moved = moved + shifts.repeat_interleave(lengths.sum(1), output_size=moved.numel())
            positions, groups = Ids(lengths, moved, weights), DistinctRows.of(moved)
        offsets = None
        if self._scale is not None:
            offsets = ops.complete_cumsum(positions.lengths.reshape(-1).to(torch.int64))
        return WidthIds(positions.values, offsets, positions.weights, groups)

    def expand(self, rows: torch.Tensor, own: DistinctIds) -> torch.Tensor:
        """Bags `[B, total width]` with outputs as blocks of columns; or vectors `[N, dim]`, output after output.

        Args:
            rows: the distinct ids' vectors, output after output, as rows of any width that divides all dims.
            own: the batch's ids.
        """
        blocks: dict[int, torch.Tensor] = {}
        for width, ids, vectors in zip(self._widths, own.widths, self._by_width(rows, own), strict=True):
            weights = None if ids.weights is None else ids.weights.to(vectors.dtype)
            sums: torch.Tensor = _Sums.apply(vectors, weights, ids.positions, ids.offsets, ids.groups)
            if self._scale is None and len(self._widths) == 1:
                return sums
            if self._scale is None:
                sizes = own.ids_O.item[width.outputs].tolist()
                blocks.update(zip(width.outputs, sums.split(sizes), strict=True))
                continue
            sums_BOD = sums.view(len(width.outputs), -1, width.dim).transpose(0, 1)
            if own.factors_BO is not None:
                columns = [own.factors_BO[:, number] for number in width.outputs]
                factors_BO = own.factors_BO if len(self._widths) == 1 else torch.stack(columns, 1)
                sums_BOD = sums_BOD * factors_BO[:, :, None]
            if len(self._widths) == 1:
                return sums_BOD.reshape(-1, len(width.outputs) * width.dim)
            blocks.update(zip(width.outputs, sums_BOD.unbind(1), strict=True))
        if self._scale is None:
            return torch.cat([blocks[number].reshape(-1, rows.shape[1]) for number in sorted(blocks)])
        return torch.cat([blocks[number] for number in sorted(blocks)], dim=1)

    def _by_width(self, rows: torch.Tensor, own: DistinctIds) -> list[torch.Tensor]:
        """For each width its outputs' vectors `[N, D]`."""
        if len(self._widths) == 1:
            return [rows]
        blocks = rows.reshape(-1).split((own.counts_O.item * self._dims_O).tolist())
        return [torch.cat([blocks[number] for number in width.outputs]).view(-1, width.dim) for width in self._widths]


def _inverse(groups: DistinctRows) -> torch.Tensor:
    """For each row number its position among the distinct ones; reuses the sort of `groups`."""
    marks = torch.zeros_like(groups.order)
    marks[groups.starts[1:]] = 1
    return torch.empty_like(marks).index_copy_(0, groups.order, marks.cumsum(0))


class _Sums(torch.autograd.Function):
    """`F.embedding_bag`, or `F.embedding` without offsets. Backward needs no sort, because the ids are grouped."""

    @staticmethod
    def forward(
        ctx: Any,
        vectors: torch.Tensor,
        weights: torch.Tensor | None,
        positions: torch.Tensor,
        offsets: torch.Tensor | None,
        groups: DistinctRows,
    ) -> torch.Tensor:
        ctx.save_for_backward(vectors, weights, positions, offsets)
        ctx.groups = groups
        return _bags(vectors, weights, positions, offsets)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        vectors, weights, positions, offsets = ctx.saved_tensors
        grad, weight_grad, bag_of_id = grads[0].contiguous(), None, None
        if ctx.needs_input_grad[1]:
            with torch.enable_grad():
                leaf = weights.detach().requires_grad_()
                (weight_grad,) = torch.autograd.grad(_bags(vectors.detach(), leaf, positions, offsets), leaf, grad)
        if offsets is not None:
            bag_of_id = row_of(offsets.diff(), positions.numel())
        return ctx.groups.sum(grad, bag_of_id, weights), weight_grad, None, None, None


def _bags(
    vectors: torch.Tensor, weights: torch.Tensor | None, positions: torch.Tensor, offsets: torch.Tensor | None
) -> torch.Tensor:
    if offsets is None:
        return vectors.index_select(0, positions)
    return F.embedding_bag(
        positions, vectors, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
    )
