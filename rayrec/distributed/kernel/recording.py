"""Records the rows that lookups may have changed, for replicas that are averaged every few steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from rayrec.distributed.kernel.interface import LocalTable, Lookups, of_inner
from rayrec.distributed.kernel.row_kernel import Stack


def records(table: LocalTable) -> bool:
    """Whether the touched rows of a table are needed."""
    replicas = None if table.optimizer is None else table.optimizer.replicas
    return replicas is not None and not replicas.every_step


class RecordingKernel:
    """A kernel with a bit for each of its rows.

    Args:
        kernel: that looks up and trains.
        table_of_lookup: for each lookup, the index of its table in `kernel.tables`.
        device: of the tables.
    """

    def __init__(self, kernel: Any, table_of_lookup: Sequence[int], device: torch.device) -> None:
        self._inner, self.tables = kernel, list(kernel.tables)
        self._stack = Stack(self.tables, table_of_lookup, device)
        self._touched = torch.zeros(self._stack.num_rows, dtype=torch.bool, device=device)

    def __repr__(self) -> str:
        return repr(self._inner)

    def _record(self, lookups: Lookups) -> None:
        if torch.is_grad_enabled():
            self._touched[self._stack.ids(lookups).to(torch.int64)] = True

    def take_touched(self) -> list[torch.Tensor]:
        """For each table the rows, ascending, that were looked up in training since the last call."""
        found = [part.nonzero().flatten() for part in self._stack.split(self._touched)]
        self._touched.zero_()
        return found

    def pooled(self, lookups: Lookups) -> torch.Tensor:
        self._record(lookups)
        pooled: torch.Tensor = self._inner.pooled(lookups)
        return pooled

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        self._record(lookups)
        vectors: torch.Tensor = self._inner.vectors(lookups)
        return vectors

    write_back = of_inner("write_back")
    weights = of_inner("weights")
    states = of_inner("states")
    learning_rate = of_inner("learning_rate")
    iteration = of_inner("iteration")
