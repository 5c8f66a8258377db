"""Tables one below the other, as one table of all their rows.

fbgemm's CPU backward sorts ids and takes buffers table by table; for many tables, or small batches, that is most of
its time. Rows know nothing of each other, so neighbouring tables of one width may as well be one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate, groupby

import torch

from rayrec.distributed.kernel.tables import LocalTable, Lookups
from rayrec.distributed.types import Span


class Stacks:
    """Which tables are one, and where the rows of each begin.

    Args:
        tables: of one dtype and optimizer.
        table_of_lookup: for each lookup, the place of its table in `tables`.
        device: where ids lie.
        apart: leave every table as it is.
    """

    def __init__(
        self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device, apart: bool = False
    ) -> None:
        self.tables: list[LocalTable] = []
        self._rows: list[list[int]] = []
        stack_of_table, first_row = [], []
        for _, members in groupby(enumerate(tables), lambda item: (item[0],) if apart else _like(item[1])):
            held = [table for _, table in members]
            rows = [table.rows.size for table in held]
            stack_of_table += [len(self.tables)] * len(held)
            first_row += list(accumulate(rows, initial=0))[:-1]
            self._rows.append(rows)
            self.tables.append(_one(held))
        self.stack_of_lookup = [stack_of_table[table] for table in table_of_lookup]
        shifts = [first_row[table] for table in table_of_lookup]
        self._shift_L = torch.tensor(shifts, dtype=torch.int64, device=device) if any(shifts) else None
        self._num_lookups = len(shifts)

    def ids(self, lookups: Lookups) -> torch.Tensor:
        """The ids of `lookups`, counted from the first row of their stack."""
        num_bags = lookups.offsets.numel() - 1
        if self._shift_L is None or not num_bags:
            return lookups.ids
        ends = lookups.offsets[:: num_bags // self._num_lookups]
        return lookups.ids + self._shift_L.repeat_interleave(ends.diff(), output_size=lookups.ids.numel())

    def apart(self, per_stack: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """From tensors of each stack's rows to views of each table's."""
        return [part for whole, rows in zip(per_stack, self._rows, strict=True) for part in whole.split(rows)]


def _like(table: LocalTable) -> tuple[object, ...]:
    return table.cols.size, table.kernel


def _one(tables: Sequence[LocalTable]) -> LocalTable:
    if len(tables) == 1:
        return tables[0]
    total = sum(table.rows.size for table in tables)
    return replace(tables[0], config=replace(tables[0].config, num_embeddings=total), rows=Span(0, total))
