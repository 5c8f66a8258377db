"""Lookups by fbgemm's table-batched embedding (TBE): all tables of a group in one call, the update in backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.host_memory import HostMemory
from rayrec.distributed.kernel.layout_choice import LayoutChoice
from rayrec.distributed.kernel.padding import Padding
from rayrec.distributed.kernel.stacking import Stack, parts_of, stacks_of
from rayrec.distributed.kernel.tables import LocalTable, Lookups
from rayrec.distributed.kernel.tbe import TBE, cuda_tbe, host_tbe, set_count
from rayrec.distributed.kernel.update_count import UpdateCount

Result = tuple[torch.Tensor, torch.autograd.graph.Node | None]  # bags, and the last node that trains in backward


def rounds_apart(optimizer: EmbOptimType) -> bool:
    """Whether fbgemm's CPU kernel for a table with several lookups is another one, which rounds in another way."""
    return optimizer is EmbOptimType.EXACT_ROWWISE_ADAGRAD


class FusedKernel:
    """A group of rectangles of one dtype, one optimizer and one share in a cache, in one TBE.

    On a CPU neighbouring tables of one width may also be one table to fbgemm, in further TBEs over the same memory.
    Whichever is faster with the batches that come is used; results are the same to the last bit.

    Args:
        tables: the rectangles; on a CPU either all with one lookup or all with several, if `rounds_apart`.
        table_of_lookup: for each lookup, the place of its table in `tables`.
        device: "cpu" or a CUDA device.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        self._stacks: list[Stack] = []
        self._stacked_tbes: list[TBE] = []
        dims = [tables[place].cols.size for place in table_of_lookup]
        self._padding: Padding | None = None
        self._scale = 1.0  # of gradients, see `Padding`
        self._memory: HostMemory | None = None
        if device.type == "cuda":
            padding = Padding(dims, device, per_row=any(tables[0].update.rule.rowwise.values()))
            self._padding, self._scale = padding if padding.needed else None, padding.scale
            self._tbe = cuda_tbe(self.tables, table_of_lookup, device, self._scale)
        else:
            self._memory = HostMemory(self.tables)
            self._tbe = host_tbe(self.tables, table_of_lookup, self._memory)
            self._stacks = stacks_of(self.tables, table_of_lookup, device)
            firsts = accumulate((stack.num_tables for stack in self._stacks), initial=0)
            self._stacked_tbes = [
                host_tbe([stack.table], [0], self._memory, first)
                for stack, first in zip(self._stacks, firsts, strict=False)
            ]
        self._ways = self._make_ways(several_lookups=len(table_of_lookup) > len(tables))
        self._choice = LayoutChoice(len(self._ways))
        self._updates = UpdateCount()

    def _make_ways(self, several_lookups: bool) -> list[Callable[[Lookups], Result]]:
        if not self._stacks:
            return [self._pooled_apart]
        if several_lookups and rounds_apart(self.tables[0].update.optimizer):
            return [self._pooled_stacked]
        return [self._pooled_apart, self._pooled_stacked]

    def __repr__(self) -> str:
        return f"FusedKernel({[table.config.name for table in self.tables]}, {self.tables[0].optimizer})"

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        if torch.is_inference_mode_enabled():  # fbgemm's operators refuse it on a CPU
            with torch.inference_mode(False), torch.no_grad():
                return self.pooled(lookups)
        out = self._choice.run(lookups.ids.numel(), [partial(way, lookups) for way in self._ways])
        self._updates.expect(out)
        return out

    def _pooled_apart(self, lookups: Lookups) -> Result:
        bags = self._run(self._tbe, lookups.ids, lookups)
        return bags if self._padding is None else self._padding.cut(bags), bags.grad_fn

    def _pooled_stacked(self, lookups: Lookups) -> Result:
        parts = zip(self._stacks, self._stacked_tbes, parts_of(self._stacks, lookups), strict=True)
        bags = [(stack, self._run(tbe, stack.ids(part), part)) for stack, tbe, part in parts]
        columns = [stack.by_example(of_stack).flatten(1) for stack, of_stack in bags]
        return columns[0] if len(columns) == 1 else torch.cat(columns, dim=1), bags[0][1].grad_fn

    def _run(self, tbe: TBE, ids: torch.Tensor, lookups: Lookups) -> torch.Tensor:
        set_count(tbe, self._updates.before_next)
        bags: torch.Tensor = tbe(ids, lookups.offsets, lookups.weights)
        return bags

    def write_back(self) -> None:
        self._tbe.flush()
        if not self._updates.pending:  # a backward under way writes to the places in the cache that it knows
            self._tbe.reset_cache_states()

    def weights(self) -> list[torch.Tensor]:
        self.write_back()
        if self._memory is not None:
            return self._memory.tables_weights()
        held = self._tbe.split_embedding_weights()
        return [weight.detach()[:, : table.cols.size] for table, weight in zip(self.tables, held, strict=True)]

    def states(self) -> list[dict[str, torch.Tensor]]:
        if self._memory is not None:
            return self._memory.tables_states()
        rule = self.tables[0].update.rule
        if not rule.rowwise:
            return [{} for _ in self.tables]
        return [
            {
                name: state.detach() if per_row else state.detach().view(table.rows.size, -1)[:, : table.cols.size]
                for (name, per_row), state in zip(rule.rowwise.items(), of_table, strict=True)
            }
            for table, of_table in zip(self.tables, self._tbe.split_optimizer_states(), strict=True)
        ]

    @property
    def learning_rate(self) -> float:
        return float(self._tbe.get_learning_rate()) * self._scale

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        for tbe in (self._tbe, *self._stacked_tbes):
            tbe.set_learning_rate(value / self._scale)

    @property
    def iteration(self) -> int:
        return self._updates.done

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._updates.done = value
