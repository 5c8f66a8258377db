"""Lookups and updates by torch's operators, for optimizers and data types that fbgemm lacks.

Replicated tables use it as well, because their gradients are exchanged between backward and the update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import nn

from rayrec.distributed.comm.host_memory import use_large_pages
from rayrec.distributed.kernel import optimizer_formulas as formulas
from rayrec.distributed.kernel.choice import loop_updates
from rayrec.distributed.kernel.compiled_update import CompiledUpdate, Memory
from rayrec.distributed.kernel.local_table import LOOP_LIMIT, LocalTable, Lookups
from rayrec.distributed.kernel.rows import DistinctRows, RowMatrix, TouchedRows
from rayrec.distributed.plan.shards import Span


def make_anchor(device: torch.device) -> torch.Tensor:
    """An empty input that requires gradients, so that autograd calls a backward with no other input that does."""
    return torch.zeros(0, device=device, requires_grad=True)


class RowKernel:
    """Tables of one width, data type and optimizer as one matrix; backward updates the touched rows.

    Args:
        tables: The rectangles.
        table_of_lookup: Index in `tables` of each lookup's table.
        device: Device of the tables.
        pooled: Whether a lookup returns bags, or the vector of each id.
    """

    leaves: tuple[nn.Parameter, ...] = ()

    def __init__(
        self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device, pooled: bool = True
    ) -> None:
        self.tables = list(tables)
        self.spec = self.tables[0].update
        self.learning_rate = self.spec.learning_rate
        self.iteration = 0
        self.touched: TouchedRows | None = None
        self.changed: TouchedRows | None = None
        self.table_of_lookup = list(table_of_lookup)
        self.matrix = RowMatrix(tables, table_of_lookup, device)
        rows, dim = self.matrix.weight_RD.shape
        self.state = formulas.make_state(self.spec, rows, dim, device)
        for state in self.state.values():
            use_large_pages(state)
        self._formula = formulas.formula_of(self.spec)
        self._anchor = make_anchor(device)
        self._pooled = pooled
        self._compiled_rows = self._make_compiled(stacked=True)  # of rows of the matrix, each a bag of its own

    def __repr__(self) -> str:
        return f"RowKernel({[table.config.name for table in self.tables]}, {self.spec})"

    @cached_property
    def compiled(self) -> CompiledUpdate | None:
        """The compiled update, or None if this kernel's tables do not have one."""
        return self._make_compiled(stacked=not self._pooled)

    def _make_compiled(self, stacked: bool) -> CompiledUpdate | None:
        matrix, states, tables = self.matrix, list(self.state.values()), self.tables
        table_of_lookup, first_rows = matrix.table_of_lookup, matrix.first_rows
        if stacked:  # the tables are one, and each id is a bag of its own
            config = replace(tables[0].config, num_embeddings=matrix.num_rows)
            tables = [replace(tables[0], config=config, rows=Span(0, matrix.num_rows))]
            table_of_lookup, first_rows = [0], [0]
        if not loop_updates(tables, table_of_lookup, matrix.weight_RD.device):
            return None
        memory = Memory(
            tensors=lambda: (matrix.weight_RD, states),
            first_weights=[row * matrix.dim for row in first_rows],
            first_states=[[row * state[0].numel() for row in first_rows] for state in states],
            widths=[matrix.dim] * len(first_rows),
        )
        return CompiledUpdate(memory, tables, table_of_lookup)

    def lookup(self, lookups: Lookups) -> torch.Tensor:
        if self.touched is not None:
            self.touched.add(lookups)
        if self.changed is not None:
            self.changed.add(lookups)
        by_row = self.matrix.row_lookups(lookups)
        vectors: torch.Tensor
        if self._pooled:
            vectors = _Lookup.apply(self._anchor, self, by_row.ids, by_row.offsets, by_row.weights, lookups)
        else:
            bags = None if self.compiled is None else Lookups(by_row.ids, torch.arange(by_row.ids.numel() + 1), None)
            vectors = _Lookup.apply(self._anchor, self, by_row.ids, None, None, bags)
        return vectors

    def train(self, rows: torch.Tensor, grads: torch.Tensor, rate: float) -> tuple[torch.Tensor, ...]:
        """Applies the optimizer to distinct `rows` of the matrix at the learning rate of their lookup."""
        if self.spec.replicas is not None and self.spec.replicas.every_step:
            rows, grads = self.spec.replicas.mean(rows, grads)
        self.iteration += 1
        weight_RD = self.matrix.weight_RD
        weight_nD = weight_RD[rows].float()
        step = formulas.Step(rows, weight_nD, grads.float(), self.state, self.spec, rate, self.iteration)
        formulas.apply(weight_RD, step, self._formula)
        return ()

    def train_all(
        self, rows: torch.Tensor, grads: torch.Tensor, rate: float, distinct: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """As `train`, for rows that may repeat unless `distinct`: gradients of equal rows are added up in order."""
        if self.changed is not None:
            self.changed.add_rows(rows)
        if distinct and self._compiled_rows is None:
            return self.train(rows, grads, rate)
        if self._compiled_rows is None or grads.numel() >= LOOP_LIMIT:
            groups = DistinctRows.of(rows, self.matrix.num_rows)
            return self.train(groups.distinct, groups.sum(grads), rate)
        self.iteration += 1
        self._compiled_rows.train(Lookups(rows, torch.arange(rows.numel() + 1), None), grads, rate, self.iteration)
        return ()

    def write_back(self) -> None:
        """Does nothing: there is no cache."""

    def weights(self) -> list[torch.Tensor]:
        return self.matrix.split(self.matrix.weight_RD)

    def states(self) -> list[dict[str, torch.Tensor]]:
        by_name = {name: self.matrix.split(state) for name, state in self.state.items()}
        return [{name: states[table] for name, states in by_name.items()} for table in range(len(self.tables))]


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
        ctx.kernel, ctx.inputs, ctx.rate, ctx.bags = kernel, (rows, offsets, weights), kernel.learning_rate, bags
        return kernel.matrix.look_up(rows, offsets, weights)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,), (rows, offsets, weights) = grads, ctx.inputs
        kernel: RowKernel = ctx.kernel
        weight_grad = kernel.matrix.weight_gradients(rows, offsets, grad) if ctx.needs_input_grad[4] else None
        if kernel.spec.frozen:
            return None, None, None, None, weight_grad, None
        if ctx.bags is not None and kernel.compiled is not None:
            kernel.iteration += 1
            kernel.compiled.train(ctx.bags, grad, ctx.rate, kernel.iteration)
        else:
            # Replicas exchange rows, and then the host must know how many there are.
            exchanged = kernel.spec.replicas is not None and kernel.spec.replicas.every_step
            groups = DistinctRows.of(rows, None if exchanged else kernel.matrix.num_rows)
            kernel.train(groups.distinct, kernel.matrix.row_gradients(groups, offsets, weights, grad), ctx.rate)
        return None, None, None, None, weight_grad, None
