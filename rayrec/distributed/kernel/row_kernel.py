"""Tables of one width and number format as one matrix, looked up and updated by torch's operators: for optimizers that
fbgemm does not have on a CPU, and for replicated tables, whose gradients are exchanged between backward and update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from rayrec.distributed.comm.host_memory import use_large_pages
from rayrec.distributed.kernel import optimizer_formulas as formulas
from rayrec.distributed.kernel.compiled_update import CompiledUpdate, Memory
from rayrec.distributed.kernel.interface import LocalTable, Lookups


@dataclass(frozen=True)
class RowGroups:
    """N row numbers grouped by row; `distinct [n]` ascending."""

    distinct: torch.Tensor
    order: torch.Tensor  # [N], equal rows next to each other
    starts: torch.Tensor  # [n], the first of each row in `order`

    @classmethod
    def of(cls, rows: torch.Tensor, spare: int | None = None) -> RowGroups:
        """From int64 `[N]`.

        With a `spare` row, on a GPU, there are as many groups as rows, the last ones empty and of that row: then the
        host does not wait for their number.
        """
        ordered, order = torch.sort(rows, stable=True)
        if spare is not None and rows.is_cuda and rows.numel():
            group = (ordered.diff() != 0).cumsum(0)
            starts = torch.searchsorted(F.pad(group, (1, 0)), torch.arange(rows.numel(), device=rows.device))
            return cls(F.pad(ordered, (0, 1), value=spare).index_select(0, starts), order, starts)
        distinct, counts = torch.unique_consecutive(ordered, return_counts=True)
        return cls(distinct, order, counts.cumsum(0) - counts)

    def sum(
        self, grads: torch.Tensor, source: torch.Tensor | None = None, factors: torch.Tensor | None = None
    ) -> torch.Tensor:
        """`[n, D]`: the gradients of equal rows added up, always in the same order.

        Args:
            grads: `[M, D]`.
            source: int64 `[N]`, the row of `grads` of each; by default one after the other.
            factors: `[N]`, or None.
        """
        if self.distinct.numel() == 0:
            return grads.new_zeros(0, grads.shape[1])
        picked = self.order if source is None else source[self.order]
        weights = None if factors is None else factors[self.order]
        return F.embedding_bag(picked, grads, self.starts, mode="sum", per_sample_weights=weights)


class Stack:
    """Tables one below the other: the rows of all, counted through.

    Args:
        tables: the rectangles.
        table_of_lookup: for each lookup, the index of its table in `tables`.
        device: of the ids, or the CPU.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.sizes = [table.rows.size for table in tables]
        *self.first_rows, self.num_rows = accumulate(self.sizes, initial=0)
        shift_L = torch.tensor([self.first_rows[table] for table in table_of_lookup], dtype=torch.int64)
        self._shift_L = {"cpu": shift_L, device.type: shift_L.to(device)} if shift_L.any() else None
        self.table_of_lookup, self.num_lookups = list(table_of_lookup), len(table_of_lookup)

    def ids(self, lookups: Lookups) -> torch.Tensor:
        """The ids of `lookups` as rows of the stack."""
        num_bags = lookups.offsets.numel() - 1
        if self._shift_L is None or not num_bags:
            return lookups.ids
        return self.rows(lookups.ids, lookups.offsets[:: num_bags // self.num_lookups].diff())

    def rows(self, ids: torch.Tensor, counts_L: torch.Tensor) -> torch.Tensor:
        """The rows of ids, which count from the first row of their table; those of a lookup lie beside each other."""
        if self._shift_L is None:
            return ids
        return ids + self._shift_L[ids.device.type].repeat_interleave(counts_L, output_size=ids.numel())

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """A tensor with one number, or one vector, for each row of the stack, as views of each table's rows."""
        return list(whole[: self.num_rows].split(self.sizes))


class RowMatrix(Stack):
    """Tables of one width and dtype, one below the other, and an unused row after the last one."""

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        super().__init__(tables, table_of_lookup, device)
        self.dim, dtype = tables[0].cols.size, tables[0].config.data_type.dtype
        self.weight_RD = torch.zeros(self.num_rows + 1, self.dim, dtype=dtype, device=device)
        use_large_pages(self.weight_RD)

    def row_lookups(self, lookups: Lookups) -> Lookups:
        """The same lookups with rows of the matrix as ids."""
        return Lookups(self.ids(lookups).to(torch.int64), lookups.offsets.to(torch.int64), lookups.weights)

    def look_up(
        self,
        rows: torch.Tensor,
        offsets: torch.Tensor | None = None,
        weights: torch.Tensor | None = None,
        weight_RD: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Sums of bags `[B, L * D]`, or without offsets each row's vector `[N, D]`; float32.

        Args:
            rows: of the matrix, or of `weight_RD`.
        """
        weight_RD = self.weight_RD if weight_RD is None else weight_RD
        if offsets is None:
            return F.embedding(rows, weight_RD).float()
        if weight_RD.dtype != torch.float32:  # sums of 16-bit numbers would be rounded to 16 bits
            weight_RD, rows = F.embedding(rows, weight_RD).float(), torch.arange(rows.numel(), device=rows.device)
        out = F.embedding_bag(
            rows, weight_RD, offsets, mode="sum", per_sample_weights=weights, include_last_offset=True
        )
        batch = out.shape[0] // self.num_lookups
        by_example = out.view(self.num_lookups, batch, self.dim).transpose(0, 1)
        return by_example.reshape(batch, self.num_lookups * self.dim)

    def row_gradients(
        self, groups: RowGroups, offsets: torch.Tensor | None, weights: torch.Tensor | None, grad: torch.Tensor
    ) -> torch.Tensor:
        """The gradient of each distinct row, from the gradient of what `look_up` returned."""
        if offsets is None:
            return groups.sum(grad.contiguous())
        by_bag, bag_of_id = self._by_bag(grad, offsets, groups.order.numel())
        return groups.sum(by_bag, bag_of_id, weights)

    def weight_gradients(self, rows: torch.Tensor, offsets: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
        """The gradient of each id's weight `[N]`, where bags are looked up."""
        by_bag, bag_of_id = self._by_bag(grad, offsets, rows.numel())
        return (by_bag[bag_of_id] * self.weight_RD[rows].float()).sum(1)

    def _by_bag(self, grad: torch.Tensor, offsets: torch.Tensor, num_ids: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Gradients `[L * B, D]`, and for each id the bag that it is in."""
        by_bag = grad.view(grad.shape[0], self.num_lookups, self.dim).transpose(0, 1).reshape(-1, self.dim)
        bags = torch.arange(offsets.numel() - 1, device=offsets.device)
        return by_bag, bags.repeat_interleave(offsets.diff(), output_size=num_ids)


def make_anchor(device: torch.device) -> torch.Tensor:
    """An input that requires gradients, so that autograd calls a backward that has no other such input."""
    return torch.zeros(0, device=device, requires_grad=True)


class RowKernel:
    """Tables of one width, dtype and optimizer as one matrix; backward updates the touched rows.

    Args:
        tables: the rectangles.
        table_of_lookup: for each lookup, the index of its table in `tables`.
        device: of the tables.
    """

    leaves: tuple[nn.Parameter, ...] = ()

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        self.spec = self.tables[0].update
        self.learning_rate = self.spec.learning_rate
        self.iteration = 0
        self.matrix = RowMatrix(tables, table_of_lookup, device)
        rows, dim = self.matrix.weight_RD.shape
        self.state = formulas.make_state(self.spec, rows, dim, device)
        for state in self.state.values():
            use_large_pages(state)
        self._formula = formulas.formula_of(self.spec)
        self._anchor = make_anchor(device)

    def __repr__(self) -> str:
        return f"RowKernel({[table.config.name for table in self.tables]}, {self.spec})"

    @cached_property
    def compiled(self) -> CompiledUpdate | None:
        """The update of bags by a compiled loop; None where there is none for this kernel."""
        table_of_lookup, device = self.matrix.table_of_lookup, self.matrix.weight_RD.device
        shared = self.spec.replicas is not None and self.spec.replicas.every_step
        if shared or not CompiledUpdate.possible(self.tables, table_of_lookup, device):
            return None
        firsts, states = self.matrix.first_rows, list(self.state.values())
        memory = Memory(
            held=lambda: (self.matrix.weight_RD, states),
            first_weights=[first * self.matrix.dim for first in firsts],
            first_states=[[first * state[0].numel() for first in firsts] for state in states],
            widths=[self.matrix.dim] * len(firsts),
        )
        return CompiledUpdate(memory, self.tables, table_of_lookup)

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        of_rows = self.matrix.row_lookups(lookups)
        out: torch.Tensor = _Lookup.apply(self._anchor, self, of_rows.ids, of_rows.offsets, of_rows.weights, lookups)
        return out

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        out: torch.Tensor = _Lookup.apply(self._anchor, self, self.matrix.row_lookups(lookups).ids, None, None, None)
        return out

    def train(self, rows: torch.Tensor, grads: torch.Tensor, rate: float | None) -> tuple[torch.Tensor, ...]:
        """Applies the optimizer to distinct `rows` of the matrix, at the learning rate of their lookup."""
        assert rate is not None
        if self.spec.replicas is not None and self.spec.replicas.every_step:
            rows, grads = self.spec.replicas.mean(rows, grads)
        self.iteration += 1
        weight_RD = self.matrix.weight_RD
        weight_nD = weight_RD[rows].float()
        step = formulas.Step(rows, weight_nD, grads.float(), self.state, self.spec, rate, self.iteration)
        formulas.apply(weight_RD, step, self._formula)
        return ()

    def write_back(self) -> None:
        """Nothing to do: there is no cache."""

    def weights(self) -> list[torch.Tensor]:
        return self.matrix.split(self.matrix.weight_RD)

    def states(self) -> list[dict[str, torch.Tensor]]:
        parts = {name: self.matrix.split(whole) for name, whole in self.state.items()}
        return [{name: pieces[number] for name, pieces in parts.items()} for number in range(len(self.tables))]


class _Lookup(torch.autograd.Function):
    """Forward looks up; backward trains."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        kernel: RowKernel,
        rows: torch.Tensor,
        offsets: torch.Tensor | None,
        weights: torch.Tensor | None,
        bags: Lookups | None,
    ) -> torch.Tensor:
        ctx.kernel, ctx.given, ctx.rate, ctx.bags = kernel, (rows, offsets, weights), kernel.learning_rate, bags
        return kernel.matrix.look_up(rows, offsets, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (rows, offsets, weights) = grads, ctx.given
        kernel: RowKernel = ctx.kernel
        weight_grad = kernel.matrix.weight_gradients(rows, offsets, grad) if ctx.needs_input_grad[4] else None
        if ctx.bags is not None and kernel.compiled is not None:
            kernel.iteration += 1
            kernel.compiled.train(ctx.bags, grad, ctx.rate, kernel.iteration)
        else:
            groups = RowGroups.of(rows)
            kernel.train(groups.distinct, kernel.matrix.row_gradients(groups, offsets, weights, grad), ctx.rate)
        return None, None, None, None, weight_grad, None
