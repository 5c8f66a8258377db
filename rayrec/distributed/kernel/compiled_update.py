"""The update of CPU tables by a compiled loop, with the sums and the optimizer's formula of fbgemm's backward.

`FusedKernel.loop_is_faster` chooses between the loop and fbgemm's own update. The loop always trains bfloat16
tables and Adam, which fbgemm does not have on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from rayrec._runtime.numba_loops import in_threads, loops
from rayrec.distributed.kernel.choice import LOOP_RULES
from rayrec.distributed.kernel.local_table import LOOP_LIMIT, LocalTable, Lookups

_LOOPS = "rayrec.distributed.kernel.update_loops"
LEAST_IDS = 1 << 11  # per thread; an update takes over a hundred times as long as a count of an id
UNEVEN = 1.25  # largest work of a thread, over the mean, that needs no parts


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory layout of a kernel's tables.

    Args:
        tensors: Returns the weights of all tables as one tensor, and one tensor for each optimizer state.
        first_weights: Position of each table's first number in the weights.
        first_states: The same for each state.
        widths: Numbers per row of each table.
    """

    tensors: Callable[[], tuple[torch.Tensor, Sequence[torch.Tensor]]]
    first_weights: Sequence[int]
    first_states: Sequence[Sequence[int]]
    widths: Sequence[int]


class CompiledUpdate:
    """Trains the tables of one kernel; see `choice.loop_updates`.

    Args:
        memory: Layout of the tables.
        tables: The tables.
        table_of_lookup: Index in `tables` of each lookup's table, ascending.
    """

    def __init__(self, memory: Memory, tables: Sequence[LocalTable], table_of_lookup: Sequence[int]) -> None:
        loop, spec = loops(_LOOPS), tables[0].update
        self._loop = loop.train_for(str(tables[0].config.data_type.dtype).removeprefix("torch."))
        self._tensors, self._rule, self._spec = memory.tensors, getattr(loop, LOOP_RULES[spec.optimizer]), spec
        table_numbers = np.arange(len(tables) + 1)
        self._first_lookup_T = np.searchsorted(np.array(table_of_lookup), table_numbers).astype(np.int64)
        cols = list(accumulate((memory.widths[table] for table in table_of_lookup), initial=0))
        self._col_L, self._width = np.array(cols[:-1], np.uint64), cols[-1]
        self._dim_T = np.array(memory.widths, np.int64)
        self._bits_T = np.array([max(1, (table.rows.size - 1).bit_length()) for table in tables], np.int64)
        self._first_weight_T = np.array(memory.first_weights, np.uint64)
        unused = [[0] * len(tables)] * (2 - len(memory.first_states))
        self._first_states = [np.array(firsts, np.uint64) for firsts in (*memory.first_states, *unused)]
        self._anchor = torch.zeros(0, requires_grad=True)  # makes autograd call the backward

    def trained(
        self, bags: torch.Tensor, lookups: Lookups, rate: float, count_update: Callable[[], None]
    ) -> torch.Tensor:
        """The bags of `lookups`. Their backward calls `count_update` and trains at this learning rate."""
        trained_bags: torch.Tensor = _Trained.apply(self._anchor, bags, self, lookups, rate, count_update)
        return trained_bags

    def train(self, lookups: Lookups, grad: torch.Tensor, rate: float, count: int = 1) -> None:
        """Applies the optimizer to the rows of `lookups`.

        Args:
            grad: Gradient of their bags `[B, width]`.
            rate: Learning rate.
            count: Number of updates, including this one. Adam reads it.
        """
        if grad.numel() >= LOOP_LIMIT:
            raise ValueError(f"{grad.shape[0]} bags of {grad.shape[1]} columns are too many; use smaller batches")
        offsets = lookups.offsets.to(torch.int64).contiguous()
        weights_N = torch.empty(0)
        if lookups.weights is not None:
            weights_N = lookups.weights.detach().to(torch.float32).contiguous()
        ids = lookups.ids.to(torch.int64).contiguous().numpy().view(np.uint64)
        first_id_T = offsets[torch.from_numpy(self._first_lookup_T) * grad.shape[0]].numpy()
        weight, states = self._tensors()
        state, second, *_ = [*map(_numbers, states), np.empty(0, np.float32), np.empty(0, np.float32)]
        first_state_T, first_second_T = self._first_states
        beta1, beta2 = self._spec.beta1, self._spec.beta2
        betas = [beta1, beta2, 1 - beta1, 1 - beta2, 1 - beta1**count, 1 - beta2**count]
        sizes = np.diff(first_id_T)
        parts = _parts(sizes)
        in_threads(
            self._loop,
            np.repeat(sizes // parts, parts),
            (ids, offsets.numpy(), weights_N.numpy(), grad.to(torch.float32).contiguous().numpy().reshape(-1)),
            (self._width, grad.shape[0], self._first_lookup_T, self._col_L, self._bits_T, self._dim_T),
            (_numbers(weight), self._first_weight_T, state, first_state_T, second, first_second_T, self._rule),
            (np.float32(rate), np.float32(self._spec.eps), np.array(betas, np.float32), parts),
            least=LEAST_IDS,
        )


def _parts(sizes: np.ndarray) -> int:
    """Parts of each table, a power of two: 1 if tables alone give the threads equal work. Every part reads all ids."""
    threads = min(torch.get_num_threads(), int(sizes.sum()) // LEAST_IDS)
    if threads < 2 or sizes.max() * threads <= UNEVEN * sizes.sum():
        return 1
    return 1 << (threads - 1).bit_length()


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    """The flat memory of a tensor, in the type that the loops use for its data type."""
    flat = tensor.detach().view(-1)
    if flat.dtype == torch.float32:
        return flat.numpy()
    bits = flat.view(torch.int16).numpy()
    return bits if flat.dtype == torch.bfloat16 else bits.view(np.uint16)


class _Trained(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        anchor: torch.Tensor,
        bags: torch.Tensor,
        update: CompiledUpdate,
        lookups: Lookups,
        rate: float,
        count_update: Callable[[], None],
    ) -> torch.Tensor:
        ctx.update, ctx.lookups, ctx.rate, ctx.count_update = update, lookups, rate, count_update
        return bags.view_as(bags)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, ...]:
        ctx.count_update()
        ctx.update.train(ctx.lookups, grads[0], ctx.rate)
        return None, None, None, None, None, None
