"""Where vectors that come back belong: from the order in which ids were sent to the order of the outputs.

The result is a matrix of one row an id, output after output; where widths differ, an id has as many rows of their
greatest common divisor as make its vector. What arrives is cut in chunks: for each rank, and each of
its lookups, the vectors of this rank's ids, as wide as the rectangle that was read. Where nothing is cut, chunks change
their order. Else little rows, as wide as divides every column cut, make one gather of row cuts and column cuts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rayrec.distributed.kernel import RowGroups
from rayrec.distributed.sharding.id_receiver import Trace
from rayrec.distributed.sharding.routing import Routes
from rayrec.distributed.sharding.sequence_dedup import Duplicates
from rayrec.sparse import ops


@dataclass(frozen=True)
class Places:
    """A batch's places.

    Args:
        chunk_sizes: numbers in each chunk that arrives, where chunks only change their order; else None.
        little: for each little row that arrives, its place among the little rows of the distinct ids' vectors.
        expand: for each id of the outputs, its place among the distinct ids; None where no duplicates were taken out.
    """

    chunk_sizes: torch.Tensor | None
    little: torch.Tensor | None
    expand: torch.Tensor | None


class SequenceOrder:
    """Puts arriving vectors in the order of the outputs, and gradients the other way.

    Args:
        routes: of the collection.
        device: where vectors lie.
    """

    def __init__(self, routes: Routes, device: torch.device) -> None:
        self._device = device
        dims = [output.dim for output in routes.outputs]
        self.dim = math.gcd(*dims)
        lookups = [lookup for route in routes.ranks for lookup in route.lookups]
        outputs = [lookup.output for lookup in lookups]
        cols = [lookup.dst_col - routes.outputs[lookup.output].col for lookup in lookups]
        self._unit = math.gcd(self.dim, *(lookup.width for lookup in lookups), *cols)
        self._dims_C = self._index([dims[output] for output in outputs])
        self._units_O = self._index([dim // self._unit for dim in dims]) if len(set(dims)) > 1 else None
        self._streams = self._stream_of_chunk(routes)
        self._output_of_chunk = self._index(outputs)
        place = {feature: number for number, feature in enumerate(routes.features)}
        features = [place[output.feature] for output in routes.outputs]
        self._features = self._index(features)
        self._moved = features != list(range(len(routes.features)))
        self._units_of_chunk = [lookup.width // self._unit for lookup in lookups]
        self._units_C = self._index(self._units_of_chunk)
        self._first_unit_C = self._index([col // self._unit for col in cols])
        # nothing is cut: every output comes in one chunk
        self._whole = sorted(outputs) == list(range(len(routes.outputs))) and not any(
            variant.edges for variant in routes.variants
        )
        self._in_order = self._whole and outputs == sorted(outputs)
        if self._whole:
            self._chunk_order = self._output_of_chunk.to(torch.int32)
            self._chunk_of_output = self._output_of_chunk.argsort().to(torch.int32)

    def _index(self, numbers: list[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def _stream_of_chunk(self, routes: Routes) -> torch.Tensor | None:
        """Which of the streams that were sent each chunk answers; None where they are the same, one by one."""
        streams, first = [], 0
        for route in routes.ranks:
            streams += [first + lookup.stream for lookup in route.lookups]
            first += len(route.streams)
        return None if streams == list(range(first)) else self._index(streams)

    def places(self, trace: Trace, duplicates: Duplicates | None) -> Places:
        """From where the ids went, and which of them stand for several (with outputs of one width)."""
        assert duplicates is None or self._units_O is None
        sizes_C = trace.lengths_S if self._streams is None else trace.lengths_S[self._streams]
        if self._whole and duplicates is None:
            return Places(None if self._in_order else sizes_C.to(torch.int64) * self._dims_C, None, None)
        rows = trace.origins
        if self._streams is not None:
            rows = ops.permute_chunks(self._streams.to(torch.int32), trace.lengths_S.to(torch.int32), rows)
        expand = None if duplicates is None else self._expand(trace, duplicates)
        return Places(None, self._spread(self._first_little(rows, sizes_C, trace.lengths_F), sizes_C), expand)

    def _shifts(self, lengths_F: torch.Tensor) -> torch.Tensor:
        """`[O]`: how far an output's first row lies behind its feature's first id."""
        lengths_O = lengths_F[self._features]
        return lengths_O.cumsum(0) - lengths_O - (lengths_F.cumsum(0) - lengths_F)[self._features]

    def _expand(self, trace: Trace, duplicates: Duplicates) -> torch.Tensor:
        if not self._moved:
            return duplicates.inverse
        lengths_F = duplicates.lengths_F
        lengths_O = lengths_F[self._features]
        order = self._features.to(torch.int32)
        picked = ops.permute_chunks(order, lengths_F.to(torch.int32), duplicates.inverse)
        return picked + self._shifts(trace.lengths_F).repeat_interleave(lengths_O, output_size=picked.numel())

    def _first_little(self, rows: torch.Tensor, sizes_C: torch.Tensor, lengths_F: torch.Tensor) -> torch.Tensor:
        """For each id that arrives its first little row, from its place among the ids of all features."""

        def of_id(numbers_C: torch.Tensor) -> torch.Tensor:
            return numbers_C.repeat_interleave(sizes_C, output_size=rows.numel())

        if self._units_O is not None:
            numbers_O = lengths_F[self._features] * self._units_O
            first_id_O = (lengths_F.cumsum(0) - lengths_F)[self._features]
            shifts_O = numbers_O.cumsum(0) - numbers_O - first_id_O * self._units_O
            shifts_C = shifts_O[self._output_of_chunk] + self._first_unit_C
            return rows * of_id(self._units_O[self._output_of_chunk]) + of_id(shifts_C)
        if self._moved:
            rows = rows + of_id(self._shifts(lengths_F)[self._output_of_chunk])
        if self._unit == self.dim:
            return rows
        return rows * (self.dim // self._unit) + of_id(self._first_unit_C)

    def _spread(self, first: torch.Tensor, sizes_C: torch.Tensor) -> torch.Tensor:
        """All little rows of each id, from its first."""
        if set(self._units_of_chunk) == {1}:
            return first
        if len(set(self._units_of_chunk)) == 1:
            steps = torch.arange(self._units_of_chunk[0], device=self._device)
            return (first[:, None] + steps).view(-1)
        counts = self._units_C.repeat_interleave(sizes_C, output_size=first.numel())
        begins = counts.cumsum(0) - counts
        little = (first - begins).repeat_interleave(counts)
        return little + torch.arange(little.numel(), device=self._device)

    def assemble(self, arrived: torch.Tensor, places: Places) -> torch.Tensor:
        """The outputs' vectors, in rows `[N, dim]`, from the flat numbers that arrived."""
        if places.little is None:
            if places.chunk_sizes is not None:
                arrived = ops.permute_chunks(self._chunk_of_output, places.chunk_sizes, arrived, self.dim)
            return arrived.view(-1, self.dim)
        little = places.little
        source = torch.empty_like(little)
        source[little] = torch.arange(little.numel(), device=self._device)
        if places.expand is not None:
            source = source.view(-1, self.dim // self._unit).index_select(0, places.expand).view(-1)
        return arrived.view(-1, self._unit).index_select(0, source).view(-1, self.dim)

    def take_apart(self, grads: torch.Tensor, places: Places, factor: float) -> torch.Tensor:
        """The flat gradients of what arrived, from those of the outputs' vectors, times `factor`; duplicates add up."""
        if places.little is None:
            if places.chunk_sizes is None:
                return grads.reshape(-1) * factor
            sizes_O = places.chunk_sizes[self._chunk_of_output]
            return ops.permute_chunks(self._chunk_order, sizes_O, grads.reshape(-1), self.dim).mul_(factor)
        if places.expand is not None:
            grads = RowGroups.of(places.expand).sum(grads.contiguous())
        return grads.reshape(-1, self._unit).index_select(0, places.little).view(-1).mul_(factor)
