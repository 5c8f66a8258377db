"""The executor of replicated tables: data-parallel, whole on every rank, kept bit-identical.

A rank looks up its own batch, as bags or id by id. In backward each rank sums the gradients of the rows that its batch
touched, all ranks exchange those rows (never a gradient of the whole table), and each rank applies the same update, or
returns the same gradient to the table's parameter. This is one collective per step for all tables. The numbers of rows
travel in the headers of the batch's ids.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch

from rayrec.distributed.executors.setup import Setup
from rayrec.distributed.ids.batch import Ids, RankIds
from rayrec.distributed.ids.input_dist import FeatureOrder
from rayrec.distributed.ids.routes import Config, Output, PlannedTable, make_outputs
from rayrec.distributed.kernel.factory import MatrixKernel, make_matrix_kernel
from rayrec.distributed.kernel.local_table import LocalTable
from rayrec.distributed.kernel.row_kernel import make_anchor
from rayrec.distributed.kernel.rows import DistinctRows, exchange_rows
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, Span
from rayrec.distributed.vectors.pooled_exchange import MeanScale
from rayrec.modules.configs import EmbeddingBagConfig
from rayrec.sparse import KeyedJaggedTensor, ops


@dataclass(frozen=True)
class GroupIds:
    """A batch's ids for one kernel.

    Args:
        rows: row of the kernel's matrix of each id.
        offsets: start of each bag, and the end of the last; None for lookups id by id.
        weights: weight of each id, or None.
        groups: the ids grouped by row; None without training and for frozen tables.
        factors_BE: factors that turn sums into means, or None.
    """

    rows: torch.Tensor
    offsets: torch.Tensor | None
    weights: torch.Tensor | None
    groups: DistinctRows | None
    factors_BE: torch.Tensor | None


@dataclass(frozen=True)
class GroupSizes:
    """What the host knows of a batch whose ids for one kernel are prepared on the device.

    Args:
        ids: number of ids.
        distinct: number of distinct rows, if other ranks get them; else None.
        trains: whether the tables train.
        factors_BE: factors that turn sums into means, or None.
    """

    ids: int
    distinct: int | None
    trains: bool
    factors_BE: torch.Tensor | None


class _Group(Generic[Config]):
    """Tables that share a kernel; each feature reads some rows of its matrix."""

    def __init__(self, setup: Setup[Config], tables: Sequence[PlannedTable[Config]]) -> None:
        configs = [table.config for table in tables]
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
        table_of_lookup = [number for number, config in enumerate(configs) for _ in config.feature_names]
        self.kernel = make_matrix_kernel(local, table_of_lookup, setup.context.device)
        self.frozen = tables[0].optimizer is not None and tables[0].optimizer.frozen
        self.outputs = make_outputs(configs)
        self.pooled = isinstance(configs[0], EmbeddingBagConfig)
        self.scale = MeanScale(configs, self.outputs)
        names = [output.feature for output in self.outputs]
        self.features = FeatureOrder(names, setup.weighted)
        self._on_device, self._names = FeatureOrder(names, setup.weighted, setup.context.device), names
        optimizer = tables[0].optimizer
        # Whether other processes get the rows: ranks, or replicas of a 2D plan.
        self._exchanges = setup.context.world_size > 1 or (optimizer is not None and optimizer.replicas is not None)

    def sizes_of(self, kjt: KeyedJaggedTensor, trains: bool, factors_BE: torch.Tensor | None) -> GroupSizes:
        """The sizes of a batch on the host, for `on_device`."""
        index, edges = kjt.index_per_key(), kjt.offset_per_key()
        starts_L = [edges[index[name]] for name in self._names]
        stops_L = [edges[index[name] + 1] for name in self._names]
        distinct = None
        if trains and self._exchanges:
            distinct = self.kernel.matrix.num_distinct(kjt.values(), starts_L, stops_L)
        return GroupSizes(sum(stops_L) - sum(starts_L), distinct, trains, factors_BE)

    def on_device(self, kjt: KeyedJaggedTensor, sizes: GroupSizes) -> GroupIds:
        """The ids of a batch on a GPU. The host does not wait."""
        return self.grouped(self._on_device.of(kjt, sizes.ids), sizes.trains, sizes.factors_BE, sizes.distinct)

    def grouped(self, ids: Ids, trains: bool, factors_BE: torch.Tensor | None, distinct: int | None = None) -> GroupIds:
        """The ids of a batch with their groups, on the host or a GPU.

        Args:
            distinct: number of distinct rows, for GPUs if other processes get them.
        """
        matrix = self.kernel.matrix
        rows = matrix.rows(ids.values, ids.lengths.sum(1, dtype=torch.int64))
        offsets = ops.complete_cumsum(ids.lengths.reshape(-1).to(torch.int64)) if self.pooled else None
        groups = DistinctRows.of(rows, matrix.num_rows, distinct) if trains else None
        return GroupIds(rows, offsets, ids.weights, groups, factors_BE)


class ReplicatedExecutor(Generic[Config]):
    """Lookups of replicated tables: bags for `EmbeddingBagConfig`, else id by id.

    Args:
        setup: the replicated tables.
    """

    def __init__(self, setup: Setup[Config]) -> None:
        self.group, self.rank, self.world_size = setup.context.group, setup.context.rank, setup.context.world_size
        by_key: dict[Hashable, list[PlannedTable[Config]]] = {}
        for table in setup.tables:
            config = table.config
            by_key.setdefault((table.optimizer, config.data_type, config.embedding_dim), []).append(table)
        self.groups = [_Group(setup, tables) for tables in by_key.values()]
        self.kernels: list[MatrixKernel] = [group.kernel for group in self.groups]
        self.blocks: list[list[Output]] = [list(group.outputs) for group in self.groups]
        self._anchor, self._weighted = make_anchor(setup.context.device), setup.weighted

    def __repr__(self) -> str:
        return f"ReplicatedExecutor({sum(map(len, self.blocks))} outputs on {self.world_size} ranks)"

    def prepare(
        self, kjt: KeyedJaggedTensor, on_device: bool
    ) -> tuple[tuple[int, ...], tuple[GroupIds | GroupSizes, ...]]:
        """Each kernel's number of distinct rows, which every rank must know before its lookup, and the ids to keep.

        Distinct rows are computed only for training. A GPU that has the batch finds them itself: the host counts them
        for the exchange.

        Args:
            kjt: the batch on the host.
            on_device: whether a GPU has it too.
        """
        kept: list[GroupIds | GroupSizes] = []
        counts, grad = list[int](), torch.is_grad_enabled()
        on_device = on_device and not (self._weighted and grad and kjt.weights().requires_grad)
        for group in self.groups:
            trains, factors_BE = grad and not group.frozen, group.scale.of(kjt)
            if on_device:
                sizes = group.sizes_of(kjt, trains, factors_BE)
                counts.append(sizes.distinct or 0)
                kept.append(sizes)
            else:
                ids = group.grouped(group.features.of(kjt), trains, factors_BE)
                counts.append(0 if ids.groups is None else ids.groups.distinct.numel())
                kept.append(ids)
        return tuple(counts), tuple(kept)

    def lookup(self, ids: RankIds, on_device: Callable[[KeyedJaggedTensor], KeyedJaggedTensor]) -> list[torch.Tensor]:
        """Each kernel's vectors, output after output: means for tables with mean pooling, sums, or vectors per id.

        Args:
            on_device: returns the executor's input, from the collection's.
        """
        kept: tuple[GroupIds, ...] = ids.kept.replicated
        if kept and isinstance(kept[0], GroupSizes):
            assert ids.features is not None
            kjt = on_device(ids.features)
            pairs = zip(self.groups, ids.kept.replicated, strict=True)
            kept = tuple(group.on_device(kjt, sizes) for group, sizes in pairs)
        weights = [group.weights for group in kept]
        leaves = [leaf for kernel in self.kernels for leaf in kernel.leaves]
        vectors = _Lookup.apply(self._anchor, self, kept, ids.counts, *weights, *leaves)
        out = []
        for sums, group in zip(vectors, kept, strict=True):
            factors_BE = group.factors_BE
            if factors_BE is not None:
                factors_BED = factors_BE[:, :, None].expand(-1, -1, sums.shape[1] // factors_BE.shape[1])
                sums = sums * factors_BED.reshape(sums.shape)
            out.append(sums)
        return out


class _Lookup(torch.autograd.Function):
    """Forward looks up; backward exchanges gradient rows with all ranks and trains."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        executor: ReplicatedExecutor[Any],
        kept: tuple[GroupIds, ...],
        counts: list[list[int]],
        *weights_and_leaves: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        ctx.executor, ctx.kept, ctx.counts = executor, kept, counts
        ctx.rates = [kernel.learning_rate for kernel in executor.kernels]
        return tuple(
            kernel.matrix.look_up(ids.rows, ids.offsets, ids.weights)
            for kernel, ids in zip(executor.kernels, kept, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        executor, kept = ctx.executor, ctx.kept
        weight_grads = [
            kernel.matrix.weight_gradients(ids.rows, ids.offsets, grad) if needed else None
            for kernel, ids, grad, needed in zip(executor.kernels, kept, grads, ctx.needs_input_grad[4:], strict=False)
        ]
        trained = [number for number, ids in enumerate(kept) if ids.groups is not None]
        kernels, leaf_grads = [executor.kernels[number] for number in trained], list[torch.Tensor]()
        sums = [
            kernel.matrix.row_gradients(kept[number].groups, kept[number].offsets, kept[number].weights, grads[number])
            for number, kernel in zip(trained, kernels, strict=True)
        ]
        rows = [kept[number].groups.distinct for number in trained]
        counts = [[of_rank[number] for number in trained] for of_rank in ctx.counts]
        exchanged = exchange_rows(rows, sums, counts, executor.group) if trained else []
        for number, kernel, (all_rows, all_sums) in zip(trained, kernels, exchanged, strict=True):
            if executor.world_size > 1:
                all_sums.div_(executor.world_size)
            leaf_grads += kernel.train_all(all_rows, all_sums, ctx.rates[number], executor.world_size == 1)
        return None, None, None, None, *weight_grads, *leaf_grads
