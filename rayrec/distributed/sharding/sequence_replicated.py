"""Data-parallel tables without pooling: whole on every rank, looked up there, kept bit-identical.

As `replicated.py` does for bags: a rank adds up the gradients of the rows that its batch touched, all ranks exchange
those rows, and each applies the same update to the same sums.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from rayrec.distributed.embedding_types import EmbeddingComputeKernel
from rayrec.distributed.kernel import LocalTable, OptimizerSpec, RowGroups, RowKernel
from rayrec.distributed.sharding.place import Place
from rayrec.distributed.sharding.replicated import update_together
from rayrec.distributed.types import Span
from rayrec.modules import EmbeddingConfig
from rayrec.sparse import KeyedJaggedTensor, ops


@dataclass(frozen=True)
class SequenceReplicatedIds:
    """A batch's ids: for each kernel the rows of its matrix, output after output."""

    rows: tuple[torch.Tensor, ...]
    groups: tuple[RowGroups, ...] | None  # None where nothing is to be trained
    counts: torch.Tensor  # int64, distinct rows of each kernel


class SequenceReplicatedExecutor:
    """Lookups, id by id, in replicated tables.

    Args:
        tables: in the order of the collection.
        optimizers: by table.
        place: this process among the ranks.
    """

    def __init__(
        self, tables: Sequence[EmbeddingConfig], optimizers: Mapping[str, OptimizerSpec], place: Place
    ) -> None:
        self._place = place
        by_key: dict[Hashable, list[EmbeddingConfig]] = {}
        for table in tables:
            key = (optimizers[table.name], table.data_type, table.embedding_dim)
            by_key.setdefault(key, []).append(table)
        self._members = list(by_key.values())
        self.kernels = [_make_kernel(members, optimizers, place.device) for members in self._members]
        # autograd needs something to differentiate with respect to; the update is the real product of backward
        self._anchor = torch.zeros(0, device=place.device, requires_grad=True)
        self._orders: dict[tuple[str, ...], list[torch.Tensor]] = {}

    def __repr__(self) -> str:
        return f"SequenceReplicatedExecutor({sum(map(len, self.outputs))} outputs on {self._place.world_size} ranks)"

    @property
    def num_groups(self) -> int:
        return len(self.kernels)

    @property
    def outputs(self) -> list[list[tuple[str, str]]]:
        """For each kernel the (table, feature) of its outputs."""
        return [[(t.name, feature) for t in members for feature in t.feature_names] for members in self._members]

    def input_dist(self, kjt: KeyedJaggedTensor) -> SequenceReplicatedIds:
        """Picks out the ids of a batch of one example; nothing is sent. Distinct rows are found only for backward."""
        rows = []
        for kernel, order in zip(self.kernels, self._order_of(kjt), strict=True):
            lengths_FB = kjt.lengths().view(len(kjt.keys()), kjt.stride())
            lengths, values, _ = ops.permute_segments(order, lengths_FB, kjt.values())
            rows.append(kernel.matrix_rows(values, lengths))
        groups = tuple(RowGroups.of(part) for part in rows) if torch.is_grad_enabled() else None
        counts = [0] * len(rows) if groups is None else [group.distinct.numel() for group in groups]
        return SequenceReplicatedIds(
            tuple(rows), groups, torch.tensor(counts, dtype=torch.int64, device=self._place.device)
        )

    def _order_of(self, kjt: KeyedJaggedTensor) -> list[torch.Tensor]:
        keys = tuple(kjt.keys())
        if keys not in self._orders:
            index = kjt.index_per_key()
            self._orders[keys] = [
                torch.tensor([index[feature] for _, feature in outputs], dtype=torch.int32, device=self._place.device)
                for outputs in self.outputs
            ]
        return self._orders[keys]

    def lookup(self, ids: SequenceReplicatedIds, row_counts: list[list[int]]) -> tuple[torch.Tensor, ...]:
        """Each kernel's vectors `[ids, width]` float32, output after output.

        Args:
            ids: from `input_dist`.
            row_counts: distinct rows of each rank and kernel.
        """
        return _Vectors.apply(self._anchor, self, ids, row_counts)

    def train(self, ids: SequenceReplicatedIds, row_counts: list[list[int]], grads: Sequence[torch.Tensor]) -> None:
        """Updates every row that some rank touched with the mean over ranks."""
        assert ids.groups is not None
        sums = [group.sum(grad.contiguous()) for group, grad in zip(ids.groups, grads, strict=True)]
        update_together(self.kernels, [group.distinct for group in ids.groups], sums, row_counts, self._place)


def _make_kernel(
    tables: Sequence[EmbeddingConfig], optimizers: Mapping[str, OptimizerSpec], device: torch.device
) -> RowKernel:
    local = [
        LocalTable(
            config=table,
            rows=Span(0, table.num_embeddings),
            cols=Span(0, table.embedding_dim),
            kernel=EmbeddingComputeKernel.FUSED,
            optimizer=optimizers[table.name],
        )
        for table in tables
    ]
    return RowKernel(local, [place for place, table in enumerate(tables) for _ in table.feature_names], device)


class _Vectors(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        executor: SequenceReplicatedExecutor,
        ids: SequenceReplicatedIds,
        row_counts: list[list[int]],
    ) -> tuple[torch.Tensor, ...]:
        ctx.executor, ctx.ids, ctx.row_counts = executor, ids, row_counts
        pairs = zip(executor.kernels, ids.rows, strict=True)
        return tuple(F.embedding(rows, kernel.weight_RD).float() for kernel, rows in pairs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        ctx.executor.train(ctx.ids, ctx.row_counts, grads)
        return None, None, None, None
