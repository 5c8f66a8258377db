"""From the columns that ranks send to the columns of the result, and back, as one gather of equal units.

Vectors are seen as rows of `unit` columns, the greatest width that divides every block. One indexed copy then puts all
blocks in place and adds up row partials; copying block by block costs several times as much. U units of an example.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from rayrec.distributed.comm.buffers import BufferPool
from rayrec.distributed.vectors.columns import ColumnMap, Run


@dataclass(frozen=True)
class _Indices:
    """Where units lie, for one batch size."""

    sources: torch.Tensor  # of the arrived rows, in the order of the result
    starts: torch.Tensor  # where each result row's sources begin
    targets: torch.Tensor  # of the result's rows, in the order in which they arrived


class ColumnOrder:
    """Puts what senders have where it belongs in the result.

    Args:
        columns: which of the result's columns each sender has.
        buffers: memory for results.
        device: where vectors lie.
    """

    def __init__(self, columns: ColumnMap, buffers: BufferPool, device: torch.device) -> None:
        self._buffers = buffers
        runs = [(sender, run) for sender, each in enumerate(columns.runs) for run in each]
        edges = [edge for _, run in runs for edge in (run.src_col, run.dst_col, run.width)]
        self._unit = math.gcd(*edges, *columns.blocks) or 1
        self._units = columns.width // self._unit
        self._rank_units = [width // self._unit for width in columns.widths]
        first = [sum(self._rank_units[:sender]) for sender in range(len(columns.runs))]
        rows = sorted(
            (run.dst_col // self._unit + n, first[sender], self._rank_units[sender], run.src_col // self._unit + n)
            for sender, run in runs
            for n in range(run.width // self._unit)
        )
        self._partials = len(rows) > self._units
        self.alike = all(each == (Run(0, 0, columns.width),) for each in columns.runs)  # every sender has all columns
        on_host = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
        self._rows = on_host.to(device)
        self._counts = torch.bincount(on_host[:, 0], minlength=self._units).to(device)  # sources of each unit
        arrival = sorted((first_unit + src, dst) for dst, first_unit, _, src in rows)
        self._dst_of_arrived = torch.tensor([dst for _, dst in arrival], dtype=torch.int64, device=device)
        self._output_of_unit = torch.tensor(
            [number for number, width in enumerate(columns.blocks) for _ in range(width // self._unit)],
            dtype=torch.int64,
            device=device,
        )
        self._in_order = len(columns.runs) == 1 and [dst for _, dst in arrival] == list(range(self._units))
        self._cache: dict[int, _Indices] = {}

    def assemble(self, arrived: torch.Tensor, batch: int, factors_BE: torch.Tensor | None) -> torch.Tensor:
        """`[B, total width]` from what every sender sent, one after the other.

        Args:
            arrived: flat, float32.
            factors_BE: a factor for each example and output, or None.
        """
        indices = self._indices(batch)
        if self._partials and batch:
            out = F.embedding_bag(indices.sources, arrived.view(-1, self._unit), indices.starts, mode="sum")
        else:
            out = self._picked(arrived, indices.sources)
        return self.scaled(out.view(batch, self._units * self._unit), factors_BE)

    def take_apart(self, grad: torch.Tensor) -> torch.Tensor:
        """The way back, flat: for every sender the gradient of each of its columns, which lie in one piece here."""
        return self._picked(grad, self._indices(grad.shape[0]).targets).view(-1)

    def scaled(self, rows: torch.Tensor, factors_BE: torch.Tensor | None) -> torch.Tensor:
        """Rows of the result times the factors of their outputs."""
        if factors_BE is None:
            return rows
        factors, out = factors_BE.index_select(1, self._output_of_unit), self._buffers.empty(rows.numel(), rows.dtype)
        units = (*factors.shape, self._unit)
        return torch.mul(rows.view(units), factors[:, :, None], out=out.view(units)).view(rows.shape)

    def _picked(self, numbers: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        """Rows of units in the order of `indices`; the very numbers where they are in order."""
        return numbers if self._in_order else self._buffers.picked(numbers, indices, self._unit)

    def _indices(self, batch: int) -> _Indices:
        """Computed once for each batch size; the last of an epoch is the only other one."""
        if batch not in self._cache:
            if len(self._cache) > 8:
                self._cache.clear()
            self._cache[batch] = self._make_indices(batch)
        return self._cache[batch]

    def _make_indices(self, batch: int) -> _Indices:
        dst, first, rank_units, src = self._rows.unbind(1)
        examples = torch.arange(batch, device=dst.device)
        sources = (batch * first + src)[None, :] + examples[:, None] * rank_units[None, :]
        starts = (self._counts.cumsum(0) - self._counts)[None, :] + examples[:, None] * dst.numel()
        blocks = self._dst_of_arrived.split(self._rank_units)
        targets = [(examples[:, None] * self._units + block[None, :]).view(-1) for block in blocks]
        return _Indices(sources.reshape(-1), starts.reshape(-1), torch.cat(targets))
