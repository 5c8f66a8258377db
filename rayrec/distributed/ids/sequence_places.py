"""Where vectors that come back belong: from the order in which ids were sent to the order of the outputs.

The result is a matrix of one row an id, output after output; where widths differ, an id has as many rows of their
greatest common divisor as make its vector. What arrives is cut in chunks: for each rank, and each of its lookups, the
vectors of this rank's ids, as wide as the rectangle that was read. Seen as units, as wide as divides every column cut,
it is the result in another order.
"""

from __future__ import annotations

import math

import torch

from rayrec.distributed.ids.batch import OutgoingIds
from rayrec.distributed.ids.routes import Routes
from rayrec.sparse import ops


class PlaceFinder:
    """Finds a batch's places, on the host. Suffixes: F features, O outputs, S streams, C chunks.

    Args:
        routes: of the collection.
    """

    def __init__(self, routes: Routes) -> None:
        lookups = [lookup for route in routes.ranks for lookup in route.lookups]
        outputs, dims = [lookup.output for lookup in lookups], [output.dim for output in routes.outputs]
        first_cols = [lookup.cols.start - routes.outputs[lookup.output].col for lookup in lookups]
        self.dim = math.gcd(*dims) or 1
        self.unit = math.gcd(self.dim, *(lookup.cols.size for lookup in lookups), *first_cols)
        # nothing is cut, and chunks come in the order of outputs
        self._in_order = outputs == list(range(len(dims))) and not any(variant.edges for variant in routes.variants)
        place = {feature: number for number, feature in enumerate(routes.features)}
        self._features_O = _index([place[output.feature] for output in routes.outputs])
        self._units_O = _index([dim // self.unit for dim in dims])
        self._one_width = len(set(dims)) <= 1
        self._streams_C = _stream_of_chunk(routes)
        self._outputs_C = _index(outputs)
        self._units_C = _index([lookup.cols.size // self.unit for lookup in lookups])
        self._widths = sorted({lookup.cols.size // self.unit for lookup in lookups})
        self._first_unit_C = _index([col // self.unit for col in first_cols])

    def find(self, outgoing: OutgoingIds) -> torch.Tensor | None:
        """For each unit that arrives its place among the result's; None where they come in order."""
        if self._in_order or outgoing.ids is None or outgoing.trace is None:
            return None
        ids, sizes_C = outgoing.trace.origins, outgoing.ids.lengths.view(-1)
        if self._streams_C is not None:
            ids = ops.permute_chunks(self._streams_C.to(torch.int32), sizes_C.to(torch.int32), ids)
            sizes_C = sizes_C[self._streams_C]

        def of_id(numbers_C: torch.Tensor) -> torch.Tensor:
            return numbers_C.repeat_interleave(sizes_C, output_size=ids.numel())

        lengths_F = outgoing.trace.lengths_FB.view(-1)
        units_O = lengths_F[self._features_O] * self._units_O
        first_id_O = (lengths_F.cumsum(0) - lengths_F)[self._features_O]
        shifts_O = units_O.cumsum(0) - units_O - first_id_O * self._units_O
        width = self._units_O[0] if self._one_width else of_id(self._units_O[self._outputs_C])
        return self._spread(ids * width + of_id(shifts_O[self._outputs_C] + self._first_unit_C), sizes_C)

    def _spread(self, first: torch.Tensor, sizes_C: torch.Tensor) -> torch.Tensor:
        """All units of each vector, from its first."""
        if self._widths == [1]:
            return first
        if len(self._widths) == 1:
            return (first[:, None] + torch.arange(*self._widths)).view(-1)
        counts = self._units_C.repeat_interleave(sizes_C, output_size=first.numel())
        units = (first - (counts.cumsum(0) - counts)).repeat_interleave(counts)
        return units + torch.arange(units.numel())


def _index(numbers: list[int]) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


def _stream_of_chunk(routes: Routes) -> torch.Tensor | None:
    """Which of the streams that were sent each chunk answers; None where they are the same, one by one."""
    streams, first = [], 0
    for route in routes.ranks:
        streams += [first + lookup.stream for lookup in route.lookups]
        first += len(route.streams)
    return None if streams == list(range(first)) else _index(streams)
