"""Lookups id by id through fbgemm's pooled kernels: every id is a bag of its own in one table that holds all others.

fbgemm has kernels that do not pool; on a CPU their backward takes more than ten times as long as this way does.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rayrec.distributed.kernel.fused import FusedKernel
from rayrec.distributed.kernel.stacking import Stack
from rayrec.distributed.kernel.tables import LocalTable, Lookups


class FusedVectorKernel:
    """Tables of one width, dtype, optimizer and place in memory, one below the other in one TBE.

    Args:
        tables: the rectangles.
        table_of_lookup: for each lookup, the place of its table in `tables`.
        device: "cpu" or a CUDA device.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        self._stack = Stack(self.tables, table_of_lookup, device)
        self._whole = FusedKernel([self._stack.table], [0], device)
        self._counting = torch.arange(1, device=device)

    def __repr__(self) -> str:
        return f"FusedVectorKernel({[table.config.name for table in self.tables]}, {self.tables[0].optimizer})"

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        offsets = self._offsets(lookups.ids.numel())
        return self._whole.pooled(Lookups(self._stack.ids(lookups), offsets, None))

    def _offsets(self, num_ids: int) -> torch.Tensor:
        if self._counting.numel() <= num_ids:
            with torch.inference_mode(False):  # it is kept, and an inference tensor cannot be saved for backward
                self._counting = torch.arange(2 * num_ids + 1, device=self._counting.device)
        return self._counting[: num_ids + 1]

    def write_back(self) -> None:
        self._whole.write_back()

    def weights(self) -> list[torch.Tensor]:
        (whole,) = self._whole.weights()
        return self._stack.apart(whole)

    def states(self) -> list[dict[str, torch.Tensor]]:
        (whole,) = self._whole.states()
        parts = {name: self._stack.apart(state) for name, state in whole.items()}
        return [{name: pieces[place] for name, pieces in parts.items()} for place in range(len(self.tables))]

    @property
    def learning_rate(self) -> float:
        return self._whole.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self._whole.learning_rate = value

    @property
    def iteration(self) -> int:
        return self._whole.iteration

    @iteration.setter
    def iteration(self, value: int) -> None:
        self._whole.iteration = value
