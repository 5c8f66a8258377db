"""Where vectors that come back belong: from the order in which ids were sent to the order of the outputs.

The result is a matrix of one row an id, output after output; where widths differ, an id has as many rows of their
greatest common divisor as make its vector. What arrives is cut in chunks: for each rank, and each of
its lookups, the vectors of this rank's ids, as wide as the rectangle that was read. Where nothing is cut, chunks change
their order. Else units, as wide as divides every column cut, make one gather of row cuts and column cuts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rayrec.distributed.kernel import RowGroups
from rayrec.distributed.sharding.id_sender import Outgoing
from rayrec.distributed.sharding.routing import Routes
from rayrec.distributed.sharding.sequence_dedup import Duplicates
from rayrec.sparse import ops


@dataclass(frozen=True)
class Places:
    """A batch's places.

    Args:
        chunk_sizes: numbers in each chunk that arrives, where chunks only change their order; else None.
        units: for each unit that arrives, its place among the units of the distinct ids' vectors.
        expand: for each id of the outputs, its place among the distinct ids; None where no duplicates were taken out.
        equal: which of the outputs' ids are the same distinct id, where gradients are wanted.
    """

    chunk_sizes: torch.Tensor | None = None
    units: torch.Tensor | None = None
    expand: torch.Tensor | None = None
    equal: RowGroups | None = None


class _Chunks:
    """What is fixed about arriving chunks and outputs; lists by chunk C or output O."""

    def __init__(self, routes: Routes) -> None:
        self.dims = [output.dim for output in routes.outputs]
        self.dim = math.gcd(*self.dims)
        lookups = [lookup for route in routes.ranks for lookup in route.lookups]
        self.outputs = [lookup.output for lookup in lookups]
        cols = [lookup.dst_col - routes.outputs[lookup.output].col for lookup in lookups]
        self.unit = math.gcd(self.dim, *(lookup.width for lookup in lookups), *cols)
        self.units = [lookup.width // self.unit for lookup in lookups]
        self.first_units = [col // self.unit for col in cols]
        # nothing is cut: every output comes in one chunk
        self.whole = sorted(self.outputs) == list(range(len(routes.outputs))) and not any(
            variant.edges for variant in routes.variants
        )


class PlaceFinder:
    """Finds a batch's places, on the host.

    Args:
        routes: of the collection.
    """

    def __init__(self, routes: Routes) -> None:
        self._chunks = chunks = _Chunks(routes)
        self._dims_C = _index([chunks.dims[output] for output in chunks.outputs])
        self._units_O = _index([dim // chunks.unit for dim in chunks.dims]) if len(set(chunks.dims)) > 1 else None
        self._streams = _stream_of_chunk(routes)
        self._output_of_chunk = _index(chunks.outputs)
        place = {feature: number for number, feature in enumerate(routes.features)}
        features = [place[output.feature] for output in routes.outputs]
        self._features = _index(features)
        self._moved = features != list(range(len(routes.features)))
        self._units_C, self._first_unit_C = _index(chunks.units), _index(chunks.first_units)
        self._in_order = chunks.whole and chunks.outputs == sorted(chunks.outputs)

    def find(self, outgoing: Outgoing, duplicates: Duplicates | None) -> Places:
        """From where the ids went, and which of them stand for several (with outputs of one width)."""
        if outgoing.problem is not None:  # nothing will come
            return Places()
        assert (duplicates is None or self._units_O is None) and outgoing.origins is not None
        lengths_F, lengths_S = outgoing.lengths_FB.view(-1), outgoing.part.lengths_SB.view(-1)
        sizes_C = lengths_S if self._streams is None else lengths_S[self._streams]
        if self._chunks.whole and duplicates is None:
            return Places() if self._in_order else Places(chunk_sizes=sizes_C.to(torch.int64) * self._dims_C)
        rows = outgoing.origins
        if self._streams is not None:
            rows = ops.permute_chunks(self._streams.to(torch.int32), lengths_S.to(torch.int32), rows)
        units = self._spread(self._first_units(rows, sizes_C, lengths_F), sizes_C)
        if duplicates is None:
            return Places(units=units)
        expand = self._expand(lengths_F, duplicates)
        equal = None
        if torch.is_grad_enabled():
            equal = RowGroups.of(expand) if self._moved else duplicates.groups
        return Places(units=units, expand=expand, equal=equal)

    def _shifts(self, lengths_F: torch.Tensor) -> torch.Tensor:
        """`[O]`: how far an output's first row lies behind its feature's first id."""
        lengths_O = lengths_F[self._features]
        return lengths_O.cumsum(0) - lengths_O - (lengths_F.cumsum(0) - lengths_F)[self._features]

    def _expand(self, lengths_F: torch.Tensor, duplicates: Duplicates) -> torch.Tensor:
        if not self._moved:
            return duplicates.inverse
        ids_F = duplicates.lengths_F
        picked = ops.permute_chunks(self._features.to(torch.int32), ids_F.to(torch.int32), duplicates.inverse)
        return picked + self._shifts(lengths_F).repeat_interleave(ids_F[self._features], output_size=picked.numel())

    def _first_units(self, rows: torch.Tensor, sizes_C: torch.Tensor, lengths_F: torch.Tensor) -> torch.Tensor:
        """For each id that arrives its first unit, from its place among the ids of all features."""

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
        if self._chunks.unit == self._chunks.dim:
            return rows
        return rows * (self._chunks.dim // self._chunks.unit) + of_id(self._first_unit_C)

    def _spread(self, first: torch.Tensor, sizes_C: torch.Tensor) -> torch.Tensor:
        """All units of each id, from its first."""
        widths = set(self._chunks.units)
        if widths == {1}:
            return first
        if len(widths) == 1:
            return (first[:, None] + torch.arange(*widths)).view(-1)
        counts = self._units_C.repeat_interleave(sizes_C, output_size=first.numel())
        begins = counts.cumsum(0) - counts
        units = (first - begins).repeat_interleave(counts)
        return units + torch.arange(units.numel())


class SequenceOrder:
    """Puts arriving vectors in the order of the outputs, and gradients the other way.

    Args:
        routes: of the collection.
        device: where vectors lie.
    """

    def __init__(self, routes: Routes, device: torch.device) -> None:
        chunks = _Chunks(routes)
        self._device, self.dim, self._unit = device, chunks.dim, chunks.unit
        if chunks.whole:
            outputs = torch.tensor(chunks.outputs, dtype=torch.int64)
            self._chunk_order = outputs.to(device, torch.int32)
            self._chunk_of_output = outputs.argsort().to(device, torch.int32)

    def assemble(self, arrived: torch.Tensor, places: Places) -> torch.Tensor:
        """The outputs' vectors, in rows `[N, dim]`, from the flat numbers that arrived."""
        if places.units is None:
            if places.chunk_sizes is not None:
                sizes_C = places.chunk_sizes
                arrived = ops.permute_chunks(self._chunk_of_output, sizes_C, arrived, self.dim, arrived.numel())
            return arrived.view(-1, self.dim)
        units = places.units
        source = torch.empty_like(units)
        source[units] = torch.arange(units.numel(), device=self._device)
        if places.expand is not None:
            source = source.view(-1, self.dim // self._unit).index_select(0, places.expand).view(-1)
        return arrived.view(-1, self._unit).index_select(0, source).view(-1, self.dim)

    def take_apart(self, grads: torch.Tensor, places: Places, factor: float) -> torch.Tensor:
        """The flat gradients of what arrived, from those of the outputs' vectors, times `factor`; duplicates add up."""
        if places.units is None:
            if places.chunk_sizes is None:
                return grads.reshape(-1) * factor
            sizes_O = places.chunk_sizes[self._chunk_of_output]
            flat = grads.reshape(-1)
            return ops.permute_chunks(self._chunk_order, sizes_O, flat, self.dim, flat.numel()).mul_(factor)
        if places.equal is not None:
            grads = places.equal.sum(grads.contiguous())
        return grads.reshape(-1, self._unit).index_select(0, places.units).view(-1).mul_(factor)


def _index(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _stream_of_chunk(routes: Routes) -> torch.Tensor | None:
    """Which of the streams that were sent each chunk answers; None where they are the same, one by one."""
    streams, first = [], 0
    for route in routes.ranks:
        streams += [first + lookup.stream for lookup in route.lookups]
        first += len(route.streams)
    return None if streams == list(range(first)) else _index(streams)
