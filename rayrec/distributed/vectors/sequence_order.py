"""Finds the order of vectors that come back id by id: from the order in which ids were sent to the order of outputs.

The result is a matrix with one row per id, output after output. If tables have different widths, its rows have the
greatest common divisor of the widths, and an id has as many rows as make its vector. Vectors come back in chunks: for
each rank and each of its lookups, the vectors of this rank's ids, as wide as the lookup's shard. In units, which are as
wide as divides every column cut, the received vectors are a permutation of the result.
"""

from __future__ import annotations

import math

import torch

from rayrec.distributed.ids.batch import OutgoingIds
from rayrec.distributed.ids.routes import Routes
from rayrec.sparse import ops


class SequenceOrder:
    """Finds the order of a batch's vectors, on the host. Suffixes: F features, O outputs, S streams, C chunks.

    Args:
        routes: routes of the collection.

    Attributes:
        dim: columns of the result.
        unit: columns of a unit.
    """

    def __init__(self, routes: Routes) -> None:
        lookups = [lookup for route in routes.ranks for lookup in route.lookups]
        outputs, dims = [lookup.output for lookup in lookups], [output.dim for output in routes.outputs]
        first_cols = [lookup.cols.start - routes.outputs[lookup.output].col for lookup in lookups]
        self.dim = math.gcd(*dims) or 1
        self.unit = math.gcd(self.dim, *(lookup.cols.size for lookup in lookups), *first_cols)
        # Chunks come in the order of outputs if nothing is cut and each output has one chunk.
        self._in_order = outputs == list(range(len(dims))) and not any(variant.edges for variant in routes.variants)
        feature_index = {feature: number for number, feature in enumerate(routes.features)}
        self._features_O = _int64([feature_index[output.feature] for output in routes.outputs])
        self._units_O = _int64([dim // self.unit for dim in dims])
        self._one_width = len(set(dims)) <= 1
        self._streams_C = _stream_of_chunk(routes)
        self._outputs_C = _int64(outputs)
        self._units_C = _int64([lookup.cols.size // self.unit for lookup in lookups])
        self._widths = sorted({lookup.cols.size // self.unit for lookup in lookups})
        self._first_unit_C = _int64([col // self.unit for col in first_cols])

    def find_units(self, outgoing: OutgoingIds) -> torch.Tensor | None:
        """The position in the result of each unit that comes back; None if units come in order."""
        if self._in_order or outgoing.ids is None or outgoing.origins is None or outgoing.lengths_FB is None:
            return None
        origins, sizes_C = outgoing.origins, outgoing.ids.lengths.view(-1)
        if self._streams_C is not None:
            origins = ops.permute_chunks(self._streams_C.to(torch.int32), sizes_C.to(torch.int32), origins)
            sizes_C = sizes_C[self._streams_C]

        def per_id(numbers_C: torch.Tensor) -> torch.Tensor:
            return numbers_C.repeat_interleave(sizes_C, output_size=origins.numel())

        lengths_F = outgoing.lengths_FB.view(-1)
        units_O = lengths_F[self._features_O] * self._units_O
        first_id_O = (lengths_F.cumsum(0) - lengths_F)[self._features_O]
        shifts_O = units_O.cumsum(0) - units_O - first_id_O * self._units_O
        width = self._units_O[0] if self._one_width else per_id(self._units_O[self._outputs_C])
        return self._spread(origins * width + per_id(shifts_O[self._outputs_C] + self._first_unit_C), sizes_C)

    def _spread(self, first: torch.Tensor, sizes_C: torch.Tensor) -> torch.Tensor:
        """The positions of all units of each vector, from the position of its first unit."""
        if self._widths == [1]:
            return first
        if len(self._widths) == 1:
            return (first[:, None] + torch.arange(*self._widths)).view(-1)
        counts = self._units_C.repeat_interleave(sizes_C, output_size=first.numel())
        units = (first - (counts.cumsum(0) - counts)).repeat_interleave(counts)
        return units + torch.arange(units.numel())


def _int64(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _stream_of_chunk(routes: Routes) -> torch.Tensor | None:
    """The sent stream that each chunk answers; None if chunk n answers stream n."""
    streams, num_streams = [], 0
    for route in routes.ranks:
        streams += [num_streams + lookup.stream for lookup in route.lookups]
        num_streams += len(route.streams)
    return None if streams == list(range(num_streams)) else _int64(streams)
