"""The update of CPU tables by a compiled loop: the sums and the optimizer's formula of fbgemm's own backward.

fbgemm's own stays where it is as fast (`CompiledUpdate.pays`; jobs/RESULTS.md has a step of both). bfloat16 and Adam,
which it does not have on a CPU, are always trained by the loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec._runtime.numba_loops import in_threads, loops
from rayrec.distributed.kernel.interface import LocalTable, Lookups

_RULES = {  # by their names in the loop's module
    EmbOptimType.EXACT_SGD: "SGD",
    EmbOptimType.EXACT_ADAGRAD: "ADAGRAD",
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: "ROWWISE_ADAGRAD",
    EmbOptimType.ADAM: "ADAM",
    EmbOptimType.PARTIAL_ROWWISE_ADAM: "PARTIAL_ROWWISE_ADAM",
}
_LOOPS = "rayrec.distributed.kernel.update_loops"
_MOST = 2**32  # rows of a table, and numbers of a gradient
MANY_LOOKUPS, FEW_BAGS = 100, 256  # of a kernel, each of at most so many bags
MANY_IDS = 4  # of a bag


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Where a kernel's tables lie.

    Args:
        held: returns the tables' numbers, and those of each of their optimizer's states, each as one tensor.
        first_weights: the first number of each table in them.
        first_states: the same for each state.
        widths: numbers of a row, of each table.
    """

    held: Callable[[], tuple[torch.Tensor, Sequence[torch.Tensor]]]
    first_weights: Sequence[int]
    first_states: Sequence[Sequence[int]]
    widths: Sequence[int]


class CompiledUpdate:
    """Trains the tables of one kernel; see `possible`.

    Args:
        memory: of the tables.
        tables: of the kernel.
        table_of_lookup: for each lookup, the index of its table in `tables`; ascending.
    """

    def __init__(self, memory: Memory, tables: Sequence[LocalTable], table_of_lookup: Sequence[int]) -> None:
        loop, spec = loops(_LOOPS), tables[0].update
        self._loop = loop.train_for(str(tables[0].config.data_type.dtype).removeprefix("torch."))
        self._held, self._rule, self._spec = memory.held, getattr(loop, _RULES[spec.optimizer]), spec
        of_tables = np.arange(len(tables) + 1)
        self._first_lookup_T = np.searchsorted(np.array(table_of_lookup), of_tables).astype(np.int64)
        cols = list(accumulate((memory.widths[table] for table in table_of_lookup), initial=0))
        self._col_L, self._width = np.array(cols[:-1], np.uint64), cols[-1]
        self._dim_T = np.array(memory.widths, np.int64)
        self._bits_T = np.array([max(1, (table.rows.size - 1).bit_length()) for table in tables], np.int64)
        self._first_weight_T = np.array(memory.first_weights, np.uint64)
        none = [[0] * len(tables)] * (2 - len(memory.first_states))
        self._first_states = [np.array(firsts, np.uint64) for firsts in (*memory.first_states, *none)]
        self._num_lookups, self._several = len(table_of_lookup), len(table_of_lookup) > len(tables)
        self._anchor = torch.zeros(0, requires_grad=True)  # so that autograd calls the backward

    def pays(self, lookups: Lookups) -> bool:
        """Whether it is the faster one for a batch of this shape."""
        num_bags = lookups.offsets.numel() - 1
        small = self._num_lookups >= MANY_LOOKUPS and num_bags <= FEW_BAGS * self._num_lookups
        return small or self._several or lookups.ids.numel() >= MANY_IDS * num_bags

    @staticmethod
    def possible(tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> bool:
        """Whether the loop can train these tables: on a CPU, the lookups of each side by side, rounded to the nearest
        number, without weight decay."""
        in_order = all(here <= there for here, there in zip(table_of_lookup, table_of_lookup[1:], strict=False))
        spec, itself = tables[0].update, tables[0].config.data_type.dtype == torch.float32
        return (
            device.type == "cpu"
            and in_order
            and (itself or not spec.stochastic_rounding)
            and not spec.weight_decay
            and spec.optimizer in _RULES
            and all(table.rows.size < _MOST for table in tables)
        )

    def trained(self, bags: torch.Tensor, lookups: Lookups, rate: float) -> torch.Tensor:
        """The bags of `lookups`, whose backward trains at this learning rate."""
        out: torch.Tensor = _Trained.apply(self._anchor, bags, self, lookups, rate)
        return out

    def train(self, lookups: Lookups, grad: torch.Tensor, rate: float, count: int = 1) -> None:
        """Applies the optimizer to the rows of `lookups`.

        Args:
            grad: of their bags `[B, width]`.
            rate: the learning rate.
            count: updates so far, this one included; Adam reads it.
        """
        if grad.numel() >= _MOST:
            raise ValueError(f"{grad.shape[0]} bags of {grad.shape[1]} columns are too many; use smaller batches")
        offsets = lookups.offsets.to(torch.int64).contiguous()
        given = torch.empty(0) if lookups.weights is None else lookups.weights.detach().to(torch.float32).contiguous()
        ids = lookups.ids.to(torch.int64).contiguous().numpy().view(np.uint64)
        first_id_T = offsets[torch.from_numpy(self._first_lookup_T) * grad.shape[0]].numpy()
        weight, states = self._held()
        state, second, *_ = [*map(_numbers, states), np.empty(0, np.float32), np.empty(0, np.float32)]
        first_state_T, first_second_T = self._first_states
        beta1, beta2 = self._spec.beta1, self._spec.beta2
        betas = [beta1, beta2, 1 - beta1, 1 - beta2, 1 - beta1**count, 1 - beta2**count]
        in_threads(
            self._loop,
            np.diff(first_id_T),
            (ids, offsets.numpy(), given.numpy(), grad.to(torch.float32).contiguous().numpy().reshape(-1)),
            (self._width, grad.shape[0], self._first_lookup_T, self._col_L, self._bits_T, self._dim_T),
            (_numbers(weight), self._first_weight_T, state, first_state_T, second, first_second_T, self._rule),
            (np.float32(rate), np.float32(self._spec.eps), np.array(betas, np.float32)),
        )


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """The flat memory of a tensor, in the type in which the loops see it."""
    flat = tensor.detach().view(-1)
    if flat.dtype == torch.float32:
        return flat.numpy()
    bits = flat.view(torch.int16).numpy()
    return bits if flat.dtype == torch.bfloat16 else bits.view(np.uint16)


class _Trained(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, bags: torch.Tensor, update: CompiledUpdate, lookups: Lookups, rate: float
    ) -> torch.Tensor:
        ctx.update, ctx.lookups, ctx.rate = update, lookups, rate
        return bags.view_as(bags)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        ctx.update.train(ctx.lookups, grads[0], ctx.rate)
        return None, None, None, None, None
