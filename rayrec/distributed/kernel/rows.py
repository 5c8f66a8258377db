"""Rows of the tables of a kernel: numbered, grouped by id, marked as touched, looked up as a matrix, exchanged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
import torch.nn.functional as F

from rayrec._runtime.numba_loops import loops
from rayrec.distributed.comm.collectives import Group, all_gather
from rayrec.distributed.comm.host_memory import use_large_pages
from rayrec.distributed.kernel.local_table import LOOP_LIMIT, LocalTable, Lookups

_SORT_LOOPS = "rayrec.distributed.kernel.sort_loops"
_INT32_MAX = torch.iinfo(torch.int32).max


@dataclass(frozen=True)
class DistinctRows:
    """N row numbers grouped by row.

    Args:
        distinct: `[n]`, ascending.
        order: `[N]`, positions sorted by row; equal rows are next to each other.
        starts: `[n]`, the first position in `order` of each distinct row.
    """

    distinct: torch.Tensor
    order: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def of(cls, rows: torch.Tensor, spare: int | None = None, number: int | None = None) -> DistinctRows:
        """Groups int64 row numbers `[N]`.

        Args:
            spare: An unused row, larger than all others. With it, a GPU returns `number` groups, of which the last ones
                are empty and of this row, so that the host does not wait for the number of groups.
            number: At least the number of distinct rows, for GPUs; by default the smaller of N and `spare`.
        """
        if not rows.is_cuda and rows.numel() and rows.numel() < LOOP_LIMIT > int(rows.max()):
            distinct, order, starts = (torch.empty_like(rows) for _ in range(3))
            found = loops(_SORT_LOOPS).group(*(each.numpy() for each in (rows.contiguous(), distinct, order, starts)))
            return cls(distinct[:found], order, starts[:found])
        if spare is not None and rows.is_cuda:
            # A GPU sorts digit by digit: small types take fewer passes.
            ordered, order = torch.sort(rows.to(torch.int32) if spare <= _INT32_MAX else rows, stable=True)
            group = (ordered.diff() != 0).cumsum(0)
            numbers = torch.arange(min(rows.numel(), spare) if number is None else number, device=rows.device)
            starts = torch.searchsorted(F.pad(group, (1, 0)), numbers)
            distinct = F.pad(ordered, (0, 1), value=spare).index_select(0, starts)
            return cls(distinct.to(torch.int64), order, starts)
        ordered, order = torch.sort(rows, stable=True)
        distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
        return cls(distinct, order, counts.cumsum(0) - counts)

    def sum(
        self, grads: torch.Tensor, source: torch.Tensor | None = None, factors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Sums of the gradients of equal rows `[n, D]`, always added up in the same order.

        Args:
            grads: `[M, D]`.
            source: int64 `[N]`, the row of `grads` of each position. By default position i reads row i.
            factors: `[N]`, or None.
        """
        if self.distinct.numel() == 0:
            return grads.new_zeros(0, grads.shape[1])
        sources = self.order if source is None else source[self.order]
        weights = None if factors is None else factors[self.order]
        return F.embedding_bag(sources, grads, self.starts, mode="sum", per_sample_weights=weights)


class StackedTables:
    """Numbers the rows of several tables consecutively.

    Args:
        tables: The rectangles.
        table_of_lookup: Index in `tables` of each lookup's table.
        device: Device of the ids. CPU ids are accepted as well.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.sizes = [table.rows.size for table in tables]
        *self.first_rows, self.num_rows = accumulate(self.sizes, initial=0)
        shift_L = torch.tensor([self.first_rows[table] for table in table_of_lookup], dtype=torch.int64)
        self._shift_L = {"cpu": shift_L, device.type: shift_L.to(device)} if shift_L.any() else None
        self.table_of_lookup, self.num_lookups = list(table_of_lookup), len(table_of_lookup)

    def num_distinct(self, ids: torch.Tensor, starts_L: Sequence[int], stops_L: Sequence[int]) -> int:
        """The number of distinct rows of the stack that a batch reads.

        Args:
            ids: `[N]`, on the host, each inside its table.
            starts_L, stops_L: Positions of each lookup's ids.
        """
        values = ids.to(torch.int64).contiguous().numpy().view(np.uint64)
        first_L = np.array([self.first_rows[table] for table in self.table_of_lookup], np.uint64)
        edges = (np.array(positions, np.uint64) for positions in (starts_L, stops_L))
        return int(loops(_SORT_LOOPS).num_distinct(values, *edges, first_L, self.num_rows))

    def ids(self, lookups: Lookups) -> torch.Tensor:
        """The ids of `lookups` as rows of the stack."""
        num_bags = lookups.offsets.numel() - 1
        if self._shift_L is None or not num_bags:
            return lookups.ids
        return self.rows(lookups.ids, lookups.offsets[:: num_bags // self.num_lookups].diff())

    def rows(self, ids: torch.Tensor, counts_L: torch.Tensor) -> torch.Tensor:
        """Rows of the stack for ids that count from the first row of their table.

        Args:
            ids: `[N]`, lookup by lookup.
            counts_L: Number of ids of each lookup.
        """
        if self._shift_L is None:
            return ids
        return ids + self._shift_L[ids.device.type].repeat_interleave(counts_L, output_size=ids.numel())

    def split(self, stacked: torch.Tensor) -> list[torch.Tensor]:
        """Views of each table's rows in a tensor with one number, or one vector, per row of the stack."""
        return list(stacked[: self.num_rows].split(self.sizes))


class TouchedRows(StackedTables):
    """One mark per row: whether a lookup may have changed it. Replicas that are averaged every few steps, and
    checkpoints of the rows that changed, need it."""

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        super().__init__(tables, table_of_lookup, device)
        self._bits = torch.zeros(self.num_rows + 1, dtype=torch.bool, device=device)  # the last one is the unused row
        self._trains = not tables[0].frozen

    def add(self, lookups: Lookups) -> None:
        """Marks the rows of `lookups` if gradients are enabled and the tables are trained."""
        if self._trains and torch.is_grad_enabled():
            self.add_rows(self.ids(lookups).to(torch.int64))

    def add_rows(self, rows: torch.Tensor) -> None:
        """Marks rows of the stack, int64."""
        if rows.is_cuda:
            self._bits.index_fill_(0, rows, True)
        else:
            self._bits.numpy()[rows.numpy()] = True

    def marks(self) -> list[torch.Tensor]:
        """The marks of each table's rows, as views."""
        return self.split(self._bits)

    def take(self) -> list[torch.Tensor]:
        """The marked rows of each table, ascending; clears the marks."""
        rows = [bits.nonzero().flatten() for bits in self.marks()]
        self._bits.zero_()
        return rows


class RowMatrix(StackedTables):
    """Tables of one width and data type as one matrix, with an unused row after the last one.

    Arguments as for `StackedTables`.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        super().__init__(tables, table_of_lookup, device)
        self.dim, dtype = tables[0].cols.size, tables[0].config.data_type.dtype
        self.weight_RD = torch.zeros(self.num_rows + 1, self.dim, dtype=dtype, device=device)
        use_large_pages(self.weight_RD)

    def row_lookups(self, lookups: Lookups) -> Lookups:
        """The same lookups, with rows of the matrix as ids."""
        return Lookups(self.ids(lookups).to(torch.int64), lookups.offsets.to(torch.int64), lookups.weights)

    def look_up(
        self,
        rows: torch.Tensor,
        offsets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        weight_RD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Float32 sums of bags `[B, L * D]`, or, without offsets, the vector of each row `[N, D]`.

        Args:
            rows: Rows of the matrix, or of `weight_RD`.
        """
        weight_RD = self.weight_RD if weight_RD is None else weight_RD
        if offsets is None:
            return F.embedding(rows, weight_RD).float()
        if weight_RD.dtype != torch.float32:
            # embedding_bag would round sums of 16-bit numbers to 16 bits.
            weight_RD, rows = F.embedding(rows, weight_RD).float(), torch.arange(rows.numel(), device=rows.device)
        sums = F.embedding_bag(
            rows, weight_RD, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        batch_size = sums.shape[0] // self.num_lookups
        by_example = sums.view(self.num_lookups, batch_size, self.dim).transpose(0, 1)
        return by_example.reshape(batch_size, self.num_lookups * self.dim)

    def row_gradients(
        self, groups: DistinctRows, offsets: torch.Tensor | None, weights: torch.Tensor | None, grad: torch.Tensor
    ) -> torch.Tensor:
        """Gradient of each distinct row, from the gradient of the result of `look_up`."""
        if offsets is None:
            return groups.sum(grad.contiguous())
        by_bag, bag_of_id = self._by_bag(grad, offsets, groups.order.numel())
        return groups.sum(by_bag, bag_of_id, weights)

    def weight_gradients(self, rows: torch.Tensor, offsets: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """Gradient of each id's weight `[N]`, of a lookup of bags."""
        by_bag, bag_of_id = self._by_bag(grad, offsets, rows.numel())
        return (by_bag[bag_of_id] * self.weight_RD[rows].float()).sum(1)

    def _by_bag(self, grad: torch.Tensor, offsets: torch.Tensor, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients of the bags `[L * B, D]`, and the bag of each id."""
        by_bag = grad.view(grad.shape[0], self.num_lookups, self.dim).transpose(0, 1).reshape(-1, self.dim)
        bags = torch.arange(offsets.numel() - 1, device=offsets.device)
        return by_bag, bags.repeat_interleave(offsets.diff(), output_size=num_ids)


def exchange_rows(
    rows: Sequence[torch.Tensor], grads: Sequence[torch.Tensor], counts: Sequence[Sequence[int]], group: Group
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gathers the rows and gradients of all ranks for each kernel, in rank order, in one collective.

    Args:
        rows: int64 distinct rows of each kernel's matrix that this rank touched.
        grads: Gradients of these rows, `[n, dim]`, for each kernel.
        counts: Number of rows of each kernel, for each rank.
        group: Process group of the ranks.
    """
    if len(counts) == 1:
        return list(zip(rows, grads, strict=True))
    dims = [grad.shape[1] for grad in grads]
    # 4-byte words of each rank's message: its rows by kernel, its gradients by kernel, padding to the longest message.
    sizes = [[2 * n for n in numbers] + [dim * n for n, dim in zip(numbers, dims, strict=True)] for numbers in counts]
    length = max(1, *map(sum, sizes))
    message = torch.empty(length, dtype=torch.int32, device=rows[0].device)
    words = [tensor.contiguous().view(-1).view(torch.int32) for tensor in (*rows, *grads)]
    torch.cat(words, out=message[: sum(tensor.numel() for tensor in words)])
    messages = all_gather(message, group).view(-1)
    segments = messages.split([size for by_rank in sizes for size in (*by_rank, length - sum(by_rank))])
    columns = [torch.cat(segments[n :: 2 * len(dims) + 1]) for n in range(2 * len(dims))]
    return [
        (columns[n].view(torch.int64), columns[n + len(dims)].view(torch.float32).view(-1, dim))
        for n, dim in enumerate(dims)
    ]
