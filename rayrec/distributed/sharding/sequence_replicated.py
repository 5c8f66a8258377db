"""Data-parallel tables without pooling: whole on every rank, looked up there, kept bit-identical.

As `replicated.py` does for bags: a rank adds up the gradients of the rows that its batch touched, all ranks exchange
those rows, and each applies the same update to the same sums.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from rayrec.distributed.kernel import OptimizerSpec, RowGroups, make_anchor
from rayrec.distributed.sharding.feature_order import FeatureOrder
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.replicated import kernel_members, train_together, whole_tables_kernel
from rayrec.distributed.sharding.upload import OnHost
from rayrec.modules import EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor


@dataclass(frozen=True)
class SequenceReplicatedIds:
    """A batch's ids: for each kernel the rows of its matrix, output after output."""

    rows: tuple[torch.Tensor, ...]
    groups: tuple[RowGroups, ...] | None  # None where nothing is to be trained
    counts: OnHost[torch.Tensor]  # int64, distinct rows of each kernel


class SequenceReplicatedExecutor:
    """Lookups, id by id, in replicated tables.

    Args:
        tables: in the order of the collection.
        optimizers: by table.
        place: this process among the ranks.
    """

    def __init__(
        self, tables: Sequence[EmbeddingConfig], optimizers: Mapping[str, OptimizerSpec | None], place: Place
    ) -> None:
        self._place = place
        self._members = kernel_members(tables, optimizers)
        self.kernels = [whole_tables_kernel(members, optimizers, place.device) for members in self._members]
        self._features = [FeatureOrder([f for _, f in outputs], torch.device("cpu")) for outputs in self.outputs]
        self._anchor = make_anchor(place.device)

    def __repr__(self) -> str:
        return f"SequenceReplicatedExecutor({sum(map(len, self.outputs))} outputs on {self._place.world_size} ranks)"

    @property
    def num_groups(self) -> int:
        return len(self.kernels)

    @property
    def outputs(self) -> list[list[tuple[str, str]]]:
        """For each kernel the (table, feature) of its outputs."""
        return [[(t.name, feature) for t in members for feature in t.feature_names] for members in self._members]

    def route(self, kjt: KeyedJaggedTensor) -> SequenceReplicatedIds:
        """Host work: picks out the ids of a batch of one example. Distinct rows are found only for backward."""
        rows = []
        for kernel, features in zip(self.kernels, self._features, strict=True):
            lengths, values, _ = features.of(kjt, weighted=False)
            rows.append(kernel.matrix.rows_of(values, lengths))
        groups = tuple(RowGroups.of(part) for part in rows) if torch.is_grad_enabled() else None
        counts = [0] * len(rows) if groups is None else [group.distinct.numel() for group in groups]
        return SequenceReplicatedIds(tuple(rows), groups, OnHost(torch.tensor(counts, dtype=torch.int64)))

    def lookup(self, ids: SequenceReplicatedIds, row_counts: list[list[int]]) -> tuple[torch.Tensor, ...]:
        """Each kernel's vectors `[ids, width]` float32, output after output.

        Args:
            ids: from `route`, on the device.
            row_counts: distinct rows of each rank and kernel.
        """
        leaves = [leaf for kernel in self.kernels for leaf in kernel.leaves]
        out: tuple[torch.Tensor, ...] = _Vectors.apply(self._anchor, self, ids, row_counts, *leaves)
        return out

    def train(
        self, ids: SequenceReplicatedIds, row_counts: list[list[int]], grads: Sequence[torch.Tensor]
    ) -> list[torch.Tensor]:
        """Trains on the mean over ranks of every row that some rank touched; returns gradients of the leaves."""
        assert ids.groups is not None
        sums = [group.sum(grad.contiguous()) for group, grad in zip(ids.groups, grads, strict=True)]
        rows = [group.distinct for group in ids.groups]
        return train_together(self.kernels, rows, sums, row_counts, self._place)


class _Vectors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        executor: SequenceReplicatedExecutor,
        ids: SequenceReplicatedIds,
        row_counts: list[list[int]],
        *leaves: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.executor, ctx.ids, ctx.row_counts = executor, ids, row_counts
        pairs = zip(executor.kernels, ids.rows, strict=True)
        return tuple(kernel.matrix.vectors(rows) for kernel, rows in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return None, None, None, None, *ctx.executor.train(ctx.ids, ctx.row_counts, grads)
