"""The second half of a step: pooled vectors back to the examples' ranks, and their gradients the same way in reverse.

One collective forward and one backward. Row partials of one bag are added up where they arrive; where that is much more
than what becomes of it, it comes in pieces of some examples each: no rank holds the partials of all ranks at once. GPUs
that then all have every column gather the gradients, which are the same for all, instead of exchanging copies.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed import comm
from rayrec.distributed.comm.awaitable import LazyAwaitable
from rayrec.distributed.comm.buffers import BufferPool
from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.vectors.column_order import ColumnOrder
from rayrec.distributed.vectors.columns import ColumnMap
from rayrec.distributed.vectors.transport import VectorTransport

LEAST_PIECE_BYTES = 1 << 24  # what arrives at once; below, memory matters less than another collective


class VectorExchange:
    """Sends each rank its examples' pooled vectors, and puts what arrives in the order of the outputs.

    Args:
        columns: which of the result's columns each rank has.
        group: joins the ranks.
        rank: of this process, among them.
        codec: number formats on the wire.
        device: where vectors lie.
    """

    def __init__(self, columns: ColumnMap, group: comm.Group, rank: int, codec: Codec, device: torch.device) -> None:
        self.rank, self.widths, self._width = rank, columns.widths, columns.width
        buffers = BufferPool(device)
        self.order = ColumnOrder(columns, buffers, device)
        self._transport = VectorTransport(group, codec, buffers)
        self.gathers = self.order.alike and device.type == "cuda"  # a gather of CPUs overlaps with nothing

    def start(
        self, pooled: torch.Tensor, batch_sizes: list[int], factors_BE: torch.Tensor | None
    ) -> LazyAwaitable[torch.Tensor]:
        """Begins to send `pooled [global B, own width]`; waits for `[own B, total width]`.

        Args:
            pooled: sums of this rank's lookups over the global batch, rank after rank.
            batch_sizes: examples of each rank.
            factors_BE: a factor for each of this rank's own examples and outputs, or None.
        """
        num_pieces = self._num_pieces(max(batch_sizes))
        cuts = {size: [size * piece // num_pieces for piece in range(num_pieces + 1)] for size in set(batch_sizes)}
        edges = [cuts[size] for size in batch_sizes]  # the same lists where ranks have equally many: quick to compare
        return self._transport.start([pooled], _PooledMessage(self, edges, factors_BE))

    def _num_pieces(self, batch: int) -> int:
        """One where at most twice the result arrives, else so many that each is at most as large as the result."""
        if sum(self.widths) <= 2 * self._width:
            return 1
        least = max(4 * batch * self._width, LEAST_PIECE_BYTES)
        return max(1, -(-4 * batch * sum(self.widths) // least))


@dataclass(frozen=True)
class _PooledMessage:
    exchange: VectorExchange
    edges: list[list[int]]  # of each rank's batch, cut in pieces
    factors_BE: torch.Tensor | None

    @property
    def num_pieces(self) -> int:
        return len(self.edges[0]) - 1

    @property
    def gathered(self) -> bool:
        return self.exchange.gathers and self.num_pieces > 1 and all(edges == self.edges[0] for edges in self.edges)

    def _own(self, piece: int) -> slice:
        return slice(*self.edges[self.exchange.rank][piece : piece + 2])

    def leave(self, piece: int) -> list[int]:
        width = self.exchange.widths[self.exchange.rank]
        return [(edges[piece + 1] - edges[piece]) * width for edges in self.edges]

    def come(self, piece: int) -> list[int]:
        own = self._own(piece)
        examples = own.stop - own.start
        return [examples * width for width in self.exchange.widths]

    def pack(self, parts: Sequence[torch.Tensor], piece: int) -> torch.Tensor:
        if self.num_pieces == 1:
            return parts[0].float().reshape(-1)
        rows = self._rows(parts[0], piece)
        return (rows[0].reshape(-1) if len(rows) == 1 else torch.cat(rows).view(-1)).float()

    def _rows(self, of_all: torch.Tensor, piece: int) -> list[torch.Tensor]:
        """A piece's rows of `[global B, width]`, as views: all at once where ranks have equally many, else by rank."""
        first = self.edges[0]
        if all(edges == first for edges in self.edges):
            return [of_all.view(len(self.edges), first[-1], of_all.shape[1])[:, first[piece] : first[piece + 1]]]
        by_rank = of_all.split([edges[-1] for edges in self.edges])
        return [rows[edges[piece] : edges[piece + 1]] for rows, edges in zip(by_rank, self.edges, strict=True)]

    def unpack(self, arrived: torch.Tensor, piece: int) -> torch.Tensor:
        own = self._own(piece)
        factors_BE = None if self.factors_BE is None else self.factors_BE[own]
        return self.exchange.order.assemble(arrived, own.stop - own.start, factors_BE)

    def pack_gradients(self, grad: torch.Tensor, piece: int) -> torch.Tensor:
        order, own = self.exchange.order, slice(None) if self.gathered else self._own(piece)
        rows = order.scaled(grad[own], None if self.factors_BE is None else self.factors_BE[own])
        return rows.reshape(-1) if self.gathered else order.take_apart(rows)

    def unpack_gradients(
        self, arrived: torch.Tensor, piece: int, shapes: Sequence[torch.Size], grads: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if self.num_pieces == 1 or self.gathered:
            return [arrived.view(shapes[0])]
        grads = grads or [arrived.new_empty(shapes[0])]
        targets = self._rows(grads[0], piece)
        for target, given in zip(targets, arrived.split([rows.numel() for rows in targets]), strict=True):
            target.copy_(given.view(target.shape))
        return grads
