"""The replicated executor: data-parallel tables, whole on every rank, kept bit-identical.

A rank looks up its own batch, bags or id by id. In backward each rank adds up the gradients of the rows that its batch
touched, all ranks exchange those rows (never a gradient of the whole table), and each applies the same update to the
same sums, or gives the same gradient to the table's parameter. One collective a step, whatever the number of tables;
how many rows follow is told with the batch's ids.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.awaitable import Deferred, LazyAwaitable
from rayrec.distributed.comm.place import Place
from rayrec.distributed.executors.setup import Config, PlannedTable, Prepared, Setup
from rayrec.distributed.ids.features import FeatureOrder
from rayrec.distributed.ids.pooling import MeanScale
from rayrec.distributed.ids.receiver import RoutedIds
from rayrec.distributed.ids.routes import Output, make_outputs
from rayrec.distributed.kernel import LocalTable, Lookups, MatrixKernel, RowGroups, make_anchor, make_matrix_kernel
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, Span
from rayrec.modules import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor, ops


@dataclass(frozen=True)
class GroupIds:
    """A batch's ids for one kernel: what to look up, which rows of its matrix those are, and what makes sums means."""

    lookups: Lookups
    rows: RowGroups | None  # None where nothing is to be trained
    factors_BE: torch.Tensor | None


Counts = list[list[int]]  # by rank
OwnRows = tuple[GroupIds, ...]  # of a batch, by kernel


class _Group(Generic[Config]):
    """Tables that share a kernel, of whose matrix each feature reads a part."""

    def __init__(self, setup: Setup[Config], tables: Sequence[PlannedTable[Config]]) -> None:
        configs = [table.config for table in tables]
        self.kernel = _whole_tables_kernel(tables, setup.place.device)
        self.outputs = make_outputs(configs)
        self.pooled = isinstance(configs[0], EmbeddingBagConfig)
        self._scale = MeanScale(configs, self.outputs)
        self._features = FeatureOrder([output.feature for output in self.outputs], setup.weighted)

    def ids_of(self, kjt: KeyedJaggedTensor) -> GroupIds:
        """What this kernel looks up. The distinct rows are found only where backward will need them."""
        given = self._features.of(kjt)
        rows = self.kernel.matrix.rows_of(given.values, given.lengths)
        offsets = ops.complete_cumsum(given.lengths.view(-1).to(torch.int64))
        groups = RowGroups.of(rows) if torch.is_grad_enabled() else None
        return GroupIds(Lookups(rows, offsets, given.weights), groups, self._scale.of(kjt))

    def vectors(self, ids: GroupIds) -> torch.Tensor:
        """Bags' sums `[B, outputs * D]`, or vectors `[ids, D]`."""
        matrix = self.kernel.matrix
        return matrix.bags(ids.lookups) if self.pooled else matrix.vectors(ids.lookups.ids)

    def row_gradients(self, ids: GroupIds, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of each distinct row."""
        assert ids.rows is not None
        if not self.pooled:
            return ids.rows.sum(grad.contiguous())
        return self.kernel.matrix.row_gradients(ids.rows, ids.lookups.offsets, ids.lookups.weights, grad)


class ReplicatedExecutor(Generic[Config]):
    """Lookups of replicated tables, as bags or id by id, as their configs say.

    Args:
        setup: what is served.
    """

    ids = None

    def __init__(self, setup: Setup[Config]) -> None:
        self._place = setup.place
        by_key: dict[Hashable, list[PlannedTable[Config]]] = {}
        for table in setup.tables:
            config = table.config
            by_key.setdefault((table.optimizer, config.data_type, config.embedding_dim), []).append(table)
        self.groups = [_Group(setup, tables) for tables in by_key.values()]
        self._anchor = make_anchor(setup.place.device)

    def __repr__(self) -> str:
        return f"ReplicatedExecutor({sum(map(len, self.blocks))} outputs on {self._place.world_size} ranks)"

    @property
    def kernels(self) -> list[MatrixKernel]:
        return [group.kernel for group in self.groups]

    @property
    def blocks(self) -> list[list[Output]]:
        return [list(group.outputs) for group in self.groups]

    def prepare(self, kjt: KeyedJaggedTensor) -> Prepared[OwnRows]:
        """All ids stay here; ranks are told how many distinct rows each kernel's are."""
        own = tuple(group.ids_of(kjt) for group in self.groups)
        return Prepared(kjt, own, tuple(0 if ids.rows is None else ids.rows.distinct.numel() for ids in own))

    def lookup(self, ids: RoutedIds, own: OwnRows) -> tuple[torch.Tensor, ...]:
        """Each kernel's bags, as sums, or vectors, output after output; backward meets the other ranks' rows."""
        weights = [group.lookups.weights for group in own]
        leaves = [leaf for kernel in self.kernels for leaf in kernel.leaves]
        out: tuple[torch.Tensor, ...] = _Lookup.apply(self._anchor, self, own, ids.told, *weights, *leaves)
        return out

    def output_dist(
        self, vectors: tuple[torch.Tensor, ...], ids: RoutedIds, own: OwnRows
    ) -> LazyAwaitable[list[torch.Tensor]]:
        """Means where tables ask for them."""
        return Deferred(lambda: [_scaled(*pair) for pair in zip(vectors, own, strict=True)])

    def train(self, step: Any, grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Meets the other ranks' gradient rows, and trains every kernel on the mean over ranks of every touched row;
        returns the gradients of the kernels' leaves.

        Args:
            step: the lookup's `own`, `told` and `rates`.
        """
        own: OwnRows = step.own
        rows = [ids.rows.distinct for ids in own if ids.rows is not None]
        triples = zip(self.groups, own, grads, strict=True)
        sums = [group.row_gradients(ids, grad) for group, ids, grad in triples]
        of_leaves: list[torch.Tensor] = []
        met = meet(rows, sums, step.told, self._place)
        for kernel, rate, (all_rows, all_sums) in zip(self.kernels, step.rates, met, strict=True):
            meeting = kernel.matrix.groups_of(all_rows)
            of_leaves += kernel.train(meeting.distinct, meeting.sum(all_sums).div_(self._place.world_size), rate)
        return of_leaves

    def weight_gradients(
        self, own: OwnRows, grads: Sequence[torch.Tensor], needed: Sequence[bool]
    ) -> list[torch.Tensor | None]:
        """The gradient of each kernel's id weights, where needed."""
        return [
            kernel.matrix.weight_gradients(ids.lookups, grad) if need else None
            for kernel, ids, grad, need in zip(self.kernels, own, grads, needed, strict=True)
        ]


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        executor: ReplicatedExecutor[Any],
        own: OwnRows,
        told: Counts,
        *weights_and_leaves: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.executor, ctx.own, ctx.told = executor, own, told
        ctx.rates = [kernel.rate for kernel in executor.kernels]
        return tuple(group.vectors(ids) for group, ids in zip(executor.groups, own, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[4 : 4 + len(grads)]  # one for each kernel's id weights
        weight_grads = ctx.executor.weight_gradients(ctx.own, grads, needed)
        return None, None, None, None, *weight_grads, *ctx.executor.train(ctx, grads)


def _scaled(sums: torch.Tensor, ids: GroupIds) -> torch.Tensor:
    if ids.factors_BE is None:
        return sums
    factors_BED = ids.factors_BE[:, :, None].expand(-1, -1, sums.shape[1] // ids.factors_BE.shape[1])
    return sums * factors_BED.reshape(sums.shape)


def meet(
    rows: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], told: Counts, place: Place
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """For each kernel the rows and gradients of all ranks, in rank order, by one gather of equal messages.

    Args:
        rows: for each kernel the distinct rows of its matrix that this rank touched, int64.
        grads: for each kernel the gradients of those rows, `[n, dim]`.
        told: how many rows each rank touched, by kernel.
    """
    if place.world_size == 1:
        return list(zip(rows, grads, strict=True))
    dims = [grad.shape[1] for grad in grads]
    # words of 4 bytes: a rank's rows, kernel after kernel, then its gradients, then what fills up to the longest
    sizes = [[2 * n for n in counts] + [dim * n for n, dim in zip(counts, dims, strict=True)] for counts in told]
    length = max(1, *map(sum, sizes))
    message = torch.empty(length, dtype=torch.int32, device=place.device)
    mine = [part.contiguous().view(-1).view(torch.int32) for part in (*rows, *grads)]
    torch.cat(mine, out=message[: sum(sizes[place.rank])])
    arrived = comm.all_gather(message, place.group).view(-1)
    pieces = arrived.split([size for of_rank in sizes for size in (*of_rank, length - sum(of_rank))])
    columns = [torch.cat(pieces[n :: 2 * len(dims) + 1]) for n in range(2 * len(dims))]
    return [
        (columns[n].view(torch.int64), columns[n + len(dims)].view(torch.float32).view(-1, dim))
        for n, dim in enumerate(dims)
    ]


def _whole_tables_kernel(tables: Sequence[PlannedTable[Config]], device: torch.device) -> MatrixKernel:
    """The kernel of whole tables, with one lookup for each of a table's features."""
    local = [
        LocalTable(
            config=table.config,
            rows=Span(0, table.config.num_embeddings),
            cols=Span(0, table.config.embedding_dim),
            kernel=EmbeddingComputeKernel.DENSE if table.optimizer is None else EmbeddingComputeKernel.FUSED,
            optimizer=table.optimizer,
        )
        for table in tables
    ]
    readers = [place for place, table in enumerate(tables) for _ in table.config.feature_names]
    return make_matrix_kernel(local, readers, device)
