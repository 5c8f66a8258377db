"""The second half of a step: pooled vectors back to the examples' ranks, and their gradients the same way in reverse.

One collective forward and one backward. Row partials of one bag are added up where they arrive.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed import comm
from rayrec.distributed.awaitable import LazyAwaitable
from rayrec.distributed.sharding.buffers import BufferPool
from rayrec.distributed.sharding.column_order import ColumnOrder
from rayrec.distributed.sharding.columns import ColumnMap
from rayrec.distributed.sharding.vector_transport import Codec, VectorTransport

__all__ = ["Codec", "VectorExchange"]


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
        self._rank, self.widths = rank, columns.widths
        buffers = BufferPool(device)
        self._order = ColumnOrder(columns, buffers, device)
        self._transport = VectorTransport(group, codec, buffers)

    def start(
        self, pooled: torch.Tensor, batch_sizes: list[int], factors_BE: torch.Tensor | None
    ) -> LazyAwaitable[torch.Tensor]:
        """Begins to send `pooled [global B, own width]`; waits for `[own B, total width]`.

        Args:
            pooled: sums of this rank's lookups over the global batch, rank after rank.
            batch_sizes: examples of each rank.
            factors_BE: a factor for each of this rank's own examples and outputs, or None.
        """
        own_batch = batch_sizes[self._rank]
        leave = [batch * self.widths[self._rank] for batch in batch_sizes]
        come = [own_batch * width for width in self.widths]
        return self._transport.start(
            [pooled], _PooledMessage(leave, come, self._order, pooled.shape, own_batch, factors_BE)
        )


@dataclass(frozen=True)
class _PooledMessage:
    leave: list[int]
    come: list[int]
    order: ColumnOrder
    shape: torch.Size  # of the sums looked up here
    own_batch: int
    factors_BE: torch.Tensor | None

    def pack(self, parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        return parts[0].to(dtype).reshape(-1)

    def unpack(self, arrived: torch.Tensor) -> torch.Tensor:
        return self.order.assemble(arrived, self.own_batch, self.factors_BE)

    def pack_gradients(self, grad: torch.Tensor) -> torch.Tensor:
        return self.order.take_apart(grad, self.factors_BE, 1 / len(self.leave))

    def unpack_gradients(self, arrived: torch.Tensor) -> Sequence[torch.Tensor]:
        return [arrived.view(self.shape)]
