"""The replicated executor: data-parallel tables, whole on every rank, kept bit-identical.

A rank looks up its own batch. In backward each rank adds up the gradients of the rows that its batch touched, all ranks
exchange those rows (never a gradient of the whole table), and each applies the same update to the same sums, or gives
the same gradient to the table's parameter. One collective a step, whatever the number of tables; how many rows follow
was announced in the ids' header.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from rayrec.distributed import comm
from rayrec.distributed.embedding_types import EmbeddingComputeKernel
from rayrec.distributed.kernel import (
    LocalTable,
    Lookups,
    MatrixKernel,
    OptimizerSpec,
    RowGroups,
    make_anchor,
    make_matrix_kernel,
)
from rayrec.distributed.sharding.feature_order import FeatureOrder
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.pooling import MeanScale
from rayrec.distributed.sharding.upload import OnHost
from rayrec.distributed.types import Span
from rayrec.modules import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from rayrec.sparse import KeyedJaggedTensor, ops

Config = TypeVar("Config", bound=BaseEmbeddingConfig)


@dataclass(frozen=True)
class GroupIds:
    """A batch's ids for one kernel: what to look up, which rows of its matrix those are, and what makes sums means."""

    lookups: Lookups
    rows: RowGroups | None  # None where nothing is to be trained
    factors_BE: torch.Tensor | None


@dataclass(frozen=True)
class ReplicatedIds:
    """A batch's ids for all replicated tables."""

    groups: tuple[GroupIds, ...]
    counts: OnHost[torch.Tensor]  # int64, distinct rows of each group


@dataclass(frozen=True)
class _Group:
    kernel: MatrixKernel
    outputs: tuple[tuple[str, str, bool], ...]  # (table, feature, whether it is a mean)
    scale: MeanScale
    features: FeatureOrder


class ReplicatedExecutor:
    """Pooled lookups of replicated tables.

    Args:
        tables: in the order of the collection.
        optimizers: by table.
        place: this process among the ranks.
        weighted: ids carry weights.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        optimizers: Mapping[str, OptimizerSpec | None],
        place: Place,
        weighted: bool,
    ) -> None:
        self._place, self._weighted = place, weighted
        members = kernel_members(tables, optimizers)
        self._groups = [_make_group(together, optimizers, place.device) for together in members]
        self.kernels = [group.kernel for group in self._groups]
        self._anchor = make_anchor(place.device)

    def __repr__(self) -> str:
        return f"ReplicatedExecutor({len(self.outputs)} outputs on {self._place.world_size} ranks)"

    @property
    def num_groups(self) -> int:
        return len(self._groups)

    @property
    def outputs(self) -> list[tuple[str, str, int]]:
        """(table, feature, width) of each block of columns, in the order of `output_dist`."""
        return [(table, f, group.kernel.matrix.dim) for group in self._groups for table, f, _ in group.outputs]

    def route(self, kjt: KeyedJaggedTensor) -> ReplicatedIds:
        """Host work: picks out the ids. The distinct rows are found only where backward will need them."""
        train = torch.is_grad_enabled()
        groups = tuple(self._group_ids(group, kjt, train) for group in self._groups)
        counts = [0 if ids.rows is None else ids.rows.distinct.numel() for ids in groups]
        return ReplicatedIds(groups, OnHost(torch.tensor(counts, dtype=torch.int64)))

    def _group_ids(self, group: _Group, kjt: KeyedJaggedTensor, train: bool) -> GroupIds:
        lengths, values, weights = group.features.of(kjt, self._weighted)
        rows = group.kernel.matrix.rows_of(values, lengths)
        offsets = ops.complete_cumsum(lengths.view(-1).to(torch.int64))
        return GroupIds(Lookups(rows, offsets, weights), RowGroups.of(rows) if train else None, group.scale.of(kjt))

    def lookup(self, ids: ReplicatedIds, row_counts: list[list[int]]) -> list[torch.Tensor]:
        """Each output's vectors `[B, width]`.

        Args:
            ids: from `route`, on the device.
            row_counts: distinct rows of each rank and group.
        """
        weights = [group.lookups.weights for group in ids.groups]
        leaves = [leaf for kernel in self.kernels for leaf in kernel.leaves]
        pooled = _Pooled.apply(self._anchor, self, ids, row_counts, *weights, *leaves)
        out: list[torch.Tensor] = []
        for group, group_ids, sums in zip(self._groups, ids.groups, pooled, strict=True):
            factors_BE = group_ids.factors_BE
            vectors_BED = sums.view(sums.shape[0], len(group.outputs), group.kernel.matrix.dim)
            if factors_BE is not None:
                vectors_BED = vectors_BED * factors_BE[:, :, None]
            out += vectors_BED.unbind(1)
        return out

    def bags(self, ids: ReplicatedIds) -> tuple[torch.Tensor, ...]:
        """Each group's sums `[B, L * D]`."""
        pairs = zip(self._groups, ids.groups, strict=True)
        return tuple(group.kernel.matrix.bags(group_ids.lookups) for group, group_ids in pairs)

    def train(
        self, ids: ReplicatedIds, row_counts: list[list[int]], grads: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Meets the other ranks' gradient rows and trains; returns the gradients of the kernels' leaves."""
        rows, sums = [], []
        for group, group_ids, grad in zip(self._groups, ids.groups, grads, strict=True):
            assert group_ids.rows is not None
            lookups = group_ids.lookups
            rows.append(group_ids.rows.distinct)
            sums.append(group.kernel.matrix.row_gradients(group_ids.rows, lookups.offsets, lookups.weights, grad))
        return train_together(self.kernels, rows, sums, row_counts, self._place)

    def weight_gradients(
        self, ids: ReplicatedIds, grads: Sequence[torch.Tensor], needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """The gradient of each group's id weights, where needed."""
        return [
            group.kernel.matrix.weight_gradients(group_ids.lookups, grad) if need else None
            for group, group_ids, grad, need in zip(self._groups, ids.groups, grads, needed, strict=True)
        ]


def train_together(
    kernels: Sequence[MatrixKernel],
    rows: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    row_counts: list[list[int]],
    place: Place,
) -> list[torch.Tensor]:
    """Meets the other ranks' gradient rows, and trains every kernel on the mean over ranks of every touched row.

    Args:
        kernels: replicas of the same tables on every rank.
        rows: for each kernel the distinct rows of its matrix that this rank touched, int64.
        grads: for each kernel the gradients of those rows, `[n, dim]`.
        row_counts: how many rows each rank touched, by kernel.

    Returns:
        The gradients of the kernels' leaves, kernel after kernel.
    """
    dims = [kernel.matrix.dim for kernel in kernels]
    of_leaves: list[torch.Tensor] = []
    for kernel, (all_rows, all_grads) in zip(kernels, _meet(rows, grads, row_counts, dims, place), strict=True):
        meeting = kernel.matrix.groups_of(all_rows)
        of_leaves += kernel.train(meeting.distinct, meeting.sum(all_grads).div_(place.world_size))
    return of_leaves


def _meet(
    rows: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
    row_counts: list[list[int]],
    dims: Sequence[int],
    place: Place,
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each kernel the rows and gradients of all ranks, in rank order, by one gather of equal messages."""
    if place.world_size == 1:
        return list(zip(rows, grads, strict=True))
    sizes = [sum(_bytes(count, dim) for count, dim in zip(counts, dims, strict=True)) for counts in row_counts]
    message = torch.empty(max(8, *sizes), dtype=torch.uint8, device=place.device)  # without any row, still aligned
    mine = []
    for of_kernel, dim in zip(zip(rows, grads, strict=True), dims, strict=True):
        mine += [part.contiguous().view(-1).view(torch.uint8) for part in of_kernel]
        count = of_kernel[0].numel()
        mine.append(message.new_empty(_bytes(count, dim) - (8 + 4 * dim) * count))
    torch.cat(mine, out=message[: sizes[place.rank]])
    arrived = comm.all_gather(message, place.group)
    out: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = [([], []) for _ in dims]
    for sent, counts in zip(arrived, row_counts, strict=True):
        at = 0
        for (kernel_rows, kernel_grads), count, dim in zip(out, counts, dims, strict=True):
            middle, end = at + 8 * count, at + _bytes(count, dim)
            kernel_rows.append(sent[at:middle].view(torch.int64))
            kernel_grads.append(sent[middle : middle + 4 * dim * count].view(torch.float32).view(count, dim))
            at = end
    return [(torch.cat(kernel_rows), torch.cat(kernel_grads)) for kernel_rows, kernel_grads in out]


def _bytes(count: int, dim: int) -> int:
    """Of a kernel's row numbers and gradients in a message; a multiple of 8, so that the next ones are aligned."""
    return -(-(8 + 4 * dim) * count // 8) * 8


def kernel_members(tables: Sequence[Config], optimizers: Mapping[str, OptimizerSpec | None]) -> list[list[Config]]:
    """The tables that share a kernel: of one optimizer (or none), number format and width."""
    by_key: dict[Hashable, list[Config]] = {}
    for table in tables:
        by_key.setdefault((optimizers[table.name], table.data_type, table.embedding_dim), []).append(table)
    return list(by_key.values())


def whole_tables_kernel(
    tables: Sequence[BaseEmbeddingConfig], optimizers: Mapping[str, OptimizerSpec | None], device: torch.device
) -> MatrixKernel:
    """The kernel of whole tables, with one lookup for each of a table's features."""
    local = [
        LocalTable(
            config=table,
            rows=Span(0, table.num_embeddings),
            cols=Span(0, table.embedding_dim),
            kernel=EmbeddingComputeKernel.DENSE if optimizers[table.name] is None else EmbeddingComputeKernel.FUSED,
            optimizer=optimizers[table.name],
        )
        for table in tables
    ]
    return make_matrix_kernel(local, [place for place, table in enumerate(tables) for _ in table.feature_names], device)


def _make_group(
    tables: Sequence[EmbeddingBagConfig], optimizers: Mapping[str, OptimizerSpec | None], device: torch.device
) -> _Group:
    outputs = tuple((t.name, f, t.pooling is PoolingType.MEAN) for t in tables for f in t.feature_names)
    return _Group(
        whole_tables_kernel(tables, optimizers, device),
        outputs,
        MeanScale([(feature, mean) for _, feature, mean in outputs]),
        FeatureOrder([feature for _, feature, _ in outputs], torch.device("cpu")),
    )


class _Pooled(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        executor: ReplicatedExecutor,
        ids: ReplicatedIds,
        row_counts: list[list[int]],
        *weights_and_leaves: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.executor, ctx.ids, ctx.row_counts = executor, ids, row_counts
        return executor.bags(ids)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[4 : 4 + len(grads)]  # one for each group's weights
        weight_grads = ctx.executor.weight_gradients(ctx.ids, grads, needed)
        return None, None, None, None, *weight_grads, *ctx.executor.train(ctx.ids, ctx.row_counts, grads)
