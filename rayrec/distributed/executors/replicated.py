"""The executor of replicated tables: data-parallel, whole on every rank, kept bit-identical.

A rank looks up its own batch, as bags or id by id. In backward each rank sums the gradients of the rows that its batch
touched, all ranks exchange those rows (never a gradient of the whole table), and each rank applies the same update, or
returns the same gradient to the table's parameter. This is one collective per step for all tables. The numbers of rows
travel in the headers of the batch's ids.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import torch

from rayrec.distributed.executors.setup import Setup
from rayrec.distributed.ids.batch import RankIds
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
        self.features = FeatureOrder([output.feature for output in self.outputs], setup.weighted)


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
        self._anchor = make_anchor(setup.context.device)

    def __repr__(self) -> str:
        return f"ReplicatedExecutor({sum(map(len, self.blocks))} outputs on {self.world_size} ranks)"

    def prepare(self, kjt: KeyedJaggedTensor) -> tuple[tuple[int, ...], tuple[GroupIds, ...]]:
        """Each kernel's number of distinct rows, which every rank must know before its lookup, and the ids to keep.

        Distinct rows are computed only for training.
        """
        kept, trains = [], torch.is_grad_enabled()
        for group in self.groups:
            ids = group.features.of(kjt)
            counts_L = ids.lengths.sum(1, dtype=torch.int64)
            rows = group.kernel.matrix.rows(ids.values.to(torch.int64), counts_L)
            offsets = ops.complete_cumsum(ids.lengths.view(-1).to(torch.int64)) if group.pooled else None
            groups = DistinctRows.of(rows) if trains and not group.frozen else None
            kept.append(GroupIds(rows, offsets, ids.weights, groups, group.scale.of(kjt)))
        return tuple(0 if ids.groups is None else ids.groups.distinct.numel() for ids in kept), tuple(kept)

    def lookup(self, ids: RankIds) -> list[torch.Tensor]:
        """Each kernel's vectors, output after output: means for tables with mean pooling, sums, or vectors per id."""
        kept: tuple[GroupIds, ...] = ids.kept.replicated
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
            leaf_grads += kernel.train_all(all_rows, all_sums.div_(executor.world_size), ctx.rates[number])
        return None, None, None, None, *weight_grads, *leaf_grads
