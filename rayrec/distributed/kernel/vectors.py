"""Lookups id by id through fbgemm's pooled kernels: every id is a bag of its own in one table that holds all others.

fbgemm has kernels that do not pool; on a CPU their backward takes more than ten times as long as this way does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from rayrec.distributed.kernel.fused import FusedKernel
from rayrec.distributed.kernel.tables import LocalTable, Lookups
from rayrec.distributed.types import Span


class FusedVectorKernel:
    """Tables of one width, dtype, optimizer and place in memory, one below the other in one TBE.

    Args:
        tables: the rectangles.
        table_of_lookup: for each lookup, the place of its table in `tables`.
        device: "cpu" or a CUDA device.
    """

    def __init__(self, tables: Sequence[LocalTable], table_of_lookup: Sequence[int], device: torch.device) -> None:
        self.tables = list(tables)
        self._rows = [table.rows.size for table in self.tables]
        *starts, total = [0, *accumulate(self._rows)]
        config = replace(self.tables[0].config, num_embeddings=total)
        self._whole = FusedKernel([replace(self.tables[0], config=config, rows=Span(0, total))], [0], device)
        self._num_lookups = len(table_of_lookup)
        self._first_row = torch.tensor([starts[t] for t in table_of_lookup], dtype=torch.int64, device=device)
        self._counting = torch.arange(1, device=device)

    def __repr__(self) -> str:
        return f"FusedVectorKernel({[table.config.name for table in self.tables]}, {self.tables[0].optimizer})"

    def vectors(self, lookups: Lookups) -> torch.Tensor:
        num_ids = lookups.ids.numel()
        ends = lookups.offsets.view(-1)[:: (lookups.offsets.numel() - 1) // self._num_lookups]
        first_row = self._first_row.repeat_interleave(ends[1:] - ends[:-1], output_size=num_ids)
        return self._whole.pooled(Lookups(lookups.ids + first_row, self._offsets(num_ids), None))

    def _offsets(self, num_ids: int) -> torch.Tensor:
        if self._counting.numel() <= num_ids:
            self._counting = torch.arange(2 * num_ids + 1, device=self._counting.device)
        return self._counting[: num_ids + 1]

    def weights(self) -> list[torch.Tensor]:
        (whole,) = self._whole.weights()
        return list(whole.split(self._rows))

    def states(self) -> list[dict[str, torch.Tensor]]:
        (whole,) = self._whole.states()
        parts = {name: state.split(self._rows) for name, state in whole.items()}
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
