"""Tables one below the other, as one table of all their rows.

On a CPU fbgemm's row-wise Adagrad is slow for a table with several lookups. A stack is one table with one lookup and
takes 0.6 to 1.1 of the time (26 lookups of 13 tables of 100,000 × 64, 16 to 1024 bags of 1 or 10 ids). Tables with one
lookup each take 0.6 to 1.05 of the time of a stack (26 tables, widths 16 to 128): they stay apart. A stack of 100
tables or more would be faster up to 64 bags of one id (1000 tables of width 8: half the time at 16 bags).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType

from rayrec.distributed.kernel.interface import LocalTable, Lookups
from rayrec.distributed.plan.shards import Span


class Stack:
    """Tables as one.

    Args:
        tables: of one width, dtype, optimizer and place in memory.
        table_of_lookup: for each lookup, the index of its table in `tables`.
        device: of the ids.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self._rows = [table.rows.size for table in tables]
        *first_row, total = accumulate(self._rows, initial=0)
        one = replace(tables[0].config, num_embeddings=total)
        self.table = tables[0] if len(tables) == 1 else replace(tables[0], config=one, rows=Span(0, total))
        shifts = [first_row[table] for table in table_of_lookup]
        self._shift_L = torch.tensor(shifts, dtype=torch.int64, device=device) if any(shifts) else None
        self.num_tables, self.num_lookups = len(tables), len(shifts)

    def ids(self, lookups: Lookups) -> torch.Tensor:
        """The ids of `lookups` as rows of the stack."""
        num_bags = lookups.offsets.numel() - 1
        if self._shift_L is None or not num_bags:
            return lookups.ids
        ends = lookups.offsets[:: num_bags // self.num_lookups]
        return lookups.ids + self._shift_L.repeat_interleave(ends.diff(), output_size=lookups.ids.numel())

    def by_example(self, bags: torch.Tensor) -> torch.Tensor:
        """The stack's bags `[L * B, D]`, lookup after lookup, as a view `[B, L, D]`."""
        return bags.view(self.num_lookups, bags.shape[0] // self.num_lookups, bags.shape[1]).transpose(0, 1)

    def split(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of the stack's rows as views of each table's rows."""
        return list(whole.split(self._rows))


def slow_with_several_lookups(optimizer: EmbOptimType) -> bool:
    """Whether fbgemm's CPU kernel for a table with several lookups is another, slower one."""
    return optimizer is EmbOptimType.EXACT_ROWWISE_ADAGRAD


def stacks_of(tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> list[Stack]:
    """Neighboring tables of one width as stacks, in the order of lookups, where that is faster; else none."""
    if (
        device.type != "cpu"
        or len(table_of_lookup) == len(tables)
        or not slow_with_several_lookups(tables[0].update.optimizer)
    ):
        return []
    runs = [[number for number, _ in run] for _, run in groupby(enumerate(tables), lambda item: item[1].cols.size)]
    in_order = all(here <= there for here, there in zip(table_of_lookup, table_of_lookup[1:], strict=False))
    if len(table_of_lookup) < 2 * len(runs) or not in_order:
        return []
    return [
        Stack(
            [tables[number] for number in run],
            [number - run[0] for number in table_of_lookup if run[0] <= number <= run[-1]],
            device,
        )
        for run in runs
    ]


def lookups_by_stack(stacks: Sequence[Stack], lookups: Lookups) -> list[Lookups]:
    """The lookups of each stack; the ids are on the host."""
    if len(stacks) == 1:
        return [lookups]
    batch = (lookups.offsets.numel() - 1) // sum(stack.num_lookups for stack in stacks)
    bounds = [batch * end for end in accumulate((stack.num_lookups for stack in stacks), initial=0)]
    starts = lookups.offsets[bounds].tolist()
    return [
        Lookups(
            lookups.ids[starts[n] : starts[n + 1]],
            lookups.offsets[bounds[n] : bounds[n + 1] + 1] - starts[n],
            None if lookups.weights is None else lookups.weights[starts[n] : starts[n + 1]],
        )
        for n in range(len(stacks))
    ]
