"""Tables one below the other, as one table of all their rows.

fbgemm's CPU backward sorts ids and takes buffers table by table; for many tables, or small batches, that is most of
its time. Rows know nothing of each other, so neighbouring tables of one width may be one table with one feature.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import torch

from rayrec.distributed.kernel.tables import LocalTable, Lookups
from rayrec.distributed.plan.shards import Span


class Stack:
    """Tables as one, and where the rows of each begin.

    Args:
        tables: of one width, dtype, optimizer and place in memory.
        table_of_lookup: for each lookup, the place of its table in `tables`.
        device: where ids lie.
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
        """The ids of `lookups`, counted from the first row of the stack."""
        num_bags = lookups.offsets.numel() - 1
        if self._shift_L is None or not num_bags:
            return lookups.ids
        ends = lookups.offsets[:: num_bags // self.num_lookups]
        return lookups.ids + self._shift_L.repeat_interleave(ends.diff(), output_size=lookups.ids.numel())

    def by_example(self, bags: torch.Tensor) -> torch.Tensor:
        """The stack's bags `[L * B, D]`, lookup after lookup, seen as `[B, L, D]`."""
        return bags.view(self.num_lookups, bags.shape[0] // self.num_lookups, bags.shape[1]).transpose(0, 1)

    def apart(self, whole: torch.Tensor) -> list[torch.Tensor]:
        """From a tensor of the stack's rows to views of each table's."""
        return list(whole.split(self._rows))


def stacks_of(tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> list[Stack]:
    """Neighbouring tables of one width as stacks, in the order of lookups; none where that spares less than half."""
    runs = [[place for place, _ in run] for _, run in groupby(enumerate(tables), lambda item: _alike(item[1]))]
    in_order = all(here <= there for here, there in zip(table_of_lookup, table_of_lookup[1:], strict=False))
    if len(table_of_lookup) < 2 * len(runs) or not in_order:
        return []
    return [
        Stack(
            [tables[place] for place in run],
            [place - run[0] for place in table_of_lookup if run[0] <= place <= run[-1]],
            device,
        )
        for run in runs
    ]


def parts_of(stacks: Sequence[Stack], lookups: Lookups) -> list[Lookups]:
    """The lookups of each stack; the ids lie on the host."""
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


def _alike(table: LocalTable) -> tuple[object, ...]:
    return table.cols.size, table.kernel
