"""output_dist of pooled vectors: sends them to the ranks of their examples, and gradients in reverse.

One collective forward and one backward. Row partials of a bag are added up where they arrive. If they need much more
memory than the result, they travel in pieces of some examples each: no rank holds the partials of all ranks at once.
GPUs that all have every column then gather the gradients, which all ranks need alike, instead of sending copies.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
import torch.nn.functional as F

from rayrec.distributed import comm
from rayrec.distributed.comm.collectives import alone
from rayrec.distributed.comm.wire import Codec
from rayrec.distributed.ids.routes import Output
from rayrec.distributed.vectors.columns import ColumnMap
from rayrec.distributed.vectors.pooled_in_place import InPlaceColumns, InPlaceTrip
from rayrec.distributed.vectors.transport import GatherTrip, MessageTrip, begin
from rayrec.modules.configs import BaseEmbeddingConfig, EmbeddingBagConfig, PoolingType
from rayrec.sparse.keyed_jagged_tensor import KeyedJaggedTensor

MIN_PIECE_BYTES = 1 << 24  # below, another collective costs more than the memory is worth


class MeanScale:
    """Factors that turn sums into means: kernels only sum, and only the rank of an example knows the length of its bag.

    Args:
        tables: tables of the outputs, and maybe others.
        outputs: outputs in the order of the factors.
    """

    def __init__(self, tables: Sequence[BaseEmbeddingConfig], outputs: Sequence[Output]) -> None:
        means = {t.name for t in tables if isinstance(t, EmbeddingBagConfig) and t.pooling is PoolingType.MEAN}
        self._features = [output.feature for output in outputs]
        self._sums = [number for number, output in enumerate(outputs) if output.table not in means]
        self._orders: dict[tuple[str, ...], list[int]] = {}

    def of(self, kjt: KeyedJaggedTensor) -> torch.Tensor | None:
        """Factors `[B, E]`: 1 / length for a mean (1 for an empty bag), 1 for a sum; None if every output is a sum."""
        if len(self._sums) == len(self._features):
            return None
        keys = tuple(kjt.keys())
        if keys not in self._orders:
            self._orders[keys] = [kjt.index_per_key()[feature] for feature in self._features]
        lengths_EB = kjt.lengths().view(len(keys), kjt.stride())[self._orders[keys]]
        factors_BE = 1 / lengths_EB.t().clamp(min=1).to(torch.float32)
        if self._sums:
            factors_BE[:, self._sums] = 1
        return factors_BE


class PooledExchange:
    """Sends each rank its examples' pooled vectors, and puts received columns in the order of the outputs.

    Args:
        columns: the result's columns that each rank has.
        group: group of the ranks.
        rank: rank of this process in the group.
        codec: number formats on the wire.
        device: device of the vectors.
    """

    def __init__(self, columns: ColumnMap, group: comm.Group, rank: int, codec: Codec, device: torch.device) -> None:
        self.rank, self.widths, self._width = rank, columns.widths, columns.width
        self.order = ColumnOrder(columns, device)
        self._group, self._codec = group, codec
        self._in_place = InPlaceColumns(columns, group, codec, device)
        self._alone = device.type == "cuda" and alone(group)
        self._gathers = device.type == "cuda" and columns.same_for_all  # on CPUs, a gather overlaps with no other work

    def start(
        self, pooled: torch.Tensor, batch_sizes: list[int], factors_BE: torch.Tensor | None
    ) -> Callable[[], torch.Tensor]:
        """Starts to send `pooled [global B, own width]`; the returned function waits for `[own B, total width]`.

        Args:
            pooled: sums of this rank's lookups over the global batch, ordered by rank.
            batch_sizes: examples of each rank.
            factors_BE: a factor for each of this rank's own examples and outputs, or None.
        """
        if self._alone and self.order.in_order and len(batch_sizes) == 1:  # what arrives is what was sent
            rows = pooled.float()
            return lambda: rows if factors_BE is None else self.order.scaled(rows, factors_BE)
        scaled = None if factors_BE is None else partial(self.order.scaled, factors_BE=factors_BE)
        if (link := self._in_place.link) is not None:
            return begin(InPlaceTrip(self._in_place, link, batch_sizes, scaled), [pooled])
        widths, largest = sum(self.widths), max(batch_sizes)
        # Up to twice the result arrives at once; more arrives in pieces, each at most as large as the result.
        num_pieces = 1
        if widths > 2 * self._width:
            num_pieces = max(1, -(-4 * largest * widths // max(4 * largest * self._width, MIN_PIECE_BYTES)))
        edges = [[size * piece // num_pieces for piece in range(num_pieces + 1)] for size in batch_sizes]
        equal_batches = min(batch_sizes) == largest
        message = _PooledMessage(self, edges, equal_batches, factors_BE)
        trip = MessageTrip(self._group, self._codec, message)
        if self._gathers and num_pieces > 1 and equal_batches:
            return begin(GatherTrip(trip, scaled), [pooled])
        return begin(trip, [pooled])


class _PooledMessage:
    """See `VectorMessage`.

    Args:
        exchange: the exchange of the vectors.
        edges: for each rank, the edges of its batch's pieces.
        equal_batches: whether all ranks have the same number of examples.
        factors_BE: as of `PooledExchange.start`.
    """

    def __init__(
        self,
        exchange: PooledExchange,
        edges: list[list[int]],
        equal_batches: bool,
        factors_BE: torch.Tensor | None,
    ) -> None:
        self._exchange, self._edges, self._equal_batches = exchange, edges, equal_batches
        self._factors_BE = factors_BE
        rank, widths, pieces = exchange.rank, exchange.widths, range(len(edges[0]) - 1)
        self._own = [slice(*edges[rank][piece : piece + 2]) for piece in pieces]
        self.sent = [[(rank_edges[p + 1] - rank_edges[p]) * widths[rank] for rank_edges in edges] for p in pieces]
        self.received = [[(own.stop - own.start) * width for width in widths] for own in self._own]

    def pack(self, vectors: Sequence[torch.Tensor], piece: int) -> torch.Tensor:
        if len(self.sent) == 1:
            return vectors[0].float().reshape(-1)
        rows = self._rows(vectors[0], piece)
        return (rows[0].reshape(-1) if len(rows) == 1 else torch.cat(rows).view(-1)).float()

    def _rows(self, tensor: torch.Tensor, piece: int) -> list[torch.Tensor]:
        """A piece's rows of `[global B, width]`, as views: one view for equal batches, else one per rank."""
        if self._equal_batches:
            edges = self._edges[0]
            return [tensor.view(len(self._edges), edges[-1], tensor.shape[1])[:, edges[piece] : edges[piece + 1]]]
        by_rank = tensor.split([edges[-1] for edges in self._edges])
        return [rows[edges[piece] : edges[piece + 1]] for rows, edges in zip(by_rank, self._edges, strict=True)]

    def unpack(self, arrived: torch.Tensor, piece: int) -> torch.Tensor:
        own = self._own[piece]
        factors_BE = None if self._factors_BE is None else self._factors_BE[own]
        return self._exchange.order.assemble(arrived, own.stop - own.start, factors_BE)

    def pack_gradients(self, grad: torch.Tensor, piece: int) -> torch.Tensor:
        order, own = self._exchange.order, self._own[piece]
        rows = grad[own] if self._factors_BE is None else order.scaled(grad[own], self._factors_BE[own])
        return order.take_apart(rows)

    def unpack_gradients(
        self, arrived: torch.Tensor, piece: int, shapes: Sequence[torch.Size], grads: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        if len(self.sent) == 1:
            return [arrived.view(shapes[0])]
        grads = grads or [arrived.new_empty(shapes[0])]
        targets = self._rows(grads[0], piece)
        for target, source in zip(targets, arrived.split([rows.numel() for rows in targets]), strict=True):
            target.copy_(source.view(target.shape))
        return grads


@dataclass(frozen=True)
class _Indices:
    """Positions of units, for one batch size."""

    sources: torch.Tensor  # of the received units, in the order of the result
    starts: torch.Tensor  # start of the sources of each unit of the result
    targets: torch.Tensor  # in the result, in the order in which units were received


class ColumnOrder:
    """Puts the senders' columns in the order of the result.

    Columns move in units: a unit is the widest run of columns that every cut respects.

    Args:
        columns: the result's columns that each sender has.
        device: device of the vectors.
    """

    def __init__(self, columns: ColumnMap, device: torch.device) -> None:
        runs = [(sender, run) for sender, sender_runs in enumerate(columns.runs) for run in sender_runs]
        edges = [edge for _, run in runs for edge in (run.src_col, run.dst_col, run.width)]
        self._unit = math.gcd(*edges, *columns.blocks) or 1
        self._units = columns.width // self._unit
        self._rank_units = [width // self._unit for width in columns.widths]
        offsets = [sum(self._rank_units[:sender]) for sender in range(len(columns.runs))]
        rows = sorted(
            (run.dst_col // self._unit + n, offsets[sender], self._rank_units[sender], run.src_col // self._unit + n)
            for sender, run in runs
            for n in range(run.width // self._unit)
        )
        self._partials = len(rows) > self._units
        on_host = torch.tensor(rows, dtype=torch.int64).view(-1, 4)
        self._rows = on_host.to(device)
        self._counts = torch.bincount(on_host[:, 0], minlength=self._units).to(device)  # sources of each unit
        received = sorted((first_unit + src, dst) for dst, first_unit, _, src in rows)
        self._targets = torch.tensor([dst for _, dst in received], dtype=torch.int64, device=device)
        self._output_of_unit = torch.tensor(
            [number for number, width in enumerate(columns.blocks) for _ in range(width // self._unit)],
            dtype=torch.int64,
            device=device,
        )
        self.in_order = len(columns.runs) == 1 and [dst for _, dst in received] == list(range(self._units))
        self._indices = lru_cache(maxsize=8)(self._make_indices)  # by batch size: an epoch has two

    def assemble(self, arrived: torch.Tensor, batch: int, factors_BE: torch.Tensor | None) -> torch.Tensor:
        """The result `[B, total width]`.

        Args:
            arrived: the columns of every sender, concatenated, flat, float32.
            factors_BE: a factor for each example and output, or None.
        """
        indices = self._indices(batch)
        if self._partials and batch:
            out = F.embedding_bag(indices.sources, arrived.view(-1, self._unit), indices.starts, mode="sum")
        else:
            out = arrived if self.in_order else arrived.view(-1, self._unit).index_select(0, indices.sources)
        rows = out.view(batch, self._units * self._unit)
        return rows if factors_BE is None else self.scaled(rows, factors_BE)

    def take_apart(self, grad: torch.Tensor) -> torch.Tensor:
        """The gradients of every sender's columns, concatenated and flat, from the gradient of the result."""
        if self.in_order:
            return grad.reshape(-1)
        return grad.reshape(-1, self._unit).index_select(0, self._indices(grad.shape[0]).targets).view(-1)

    def scaled(self, rows: torch.Tensor, factors_BE: torch.Tensor) -> torch.Tensor:
        """Rows of the result, times the factors of their outputs."""
        factors = factors_BE.index_select(1, self._output_of_unit)
        return (rows.view(*factors.shape, self._unit) * factors[:, :, None]).view(rows.shape)

    def _make_indices(self, batch: int) -> _Indices:
        dst, offsets, rank_units, src = self._rows.unbind(1)
        examples = torch.arange(batch, device=dst.device)
        sources = (batch * offsets + src)[None, :] + examples[:, None] * rank_units[None, :]
        starts = (self._counts.cumsum(0) - self._counts)[None, :] + examples[:, None] * dst.numel()
        blocks = self._targets.split(self._rank_units)
        targets = [(examples[:, None] * self._units + block[None, :]).view(-1) for block in blocks]
        return _Indices(sources.reshape(-1), starts.reshape(-1), torch.cat(targets))
