"""A batch's ids in the order of the ranks that hold their rows, by torch's operators: what loops are compared with."""

from __future__ import annotations

import torch

from rayrec.distributed.ids.batch import Ids, Split, Trace
from rayrec.distributed.ids.routes import Routes
from rayrec.sparse import KeyedJaggedTensor


class PlainSplit:
    """Splits ids by selecting those of each stream in turn.

    Args:
        routes: of the collection.
        weighted: ids carry weights.
        traced: also record where each id comes from.

    Attributes:
        checked: features whose ids are compared with the rows of their tables: none.
    """

    def __init__(self, routes: Routes, weighted: bool, traced: bool) -> None:
        self.checked: frozenset[str] = frozenset()
        self._features, self._weighted, self._traced = routes.features, weighted, traced
        self._streams = [
            (stream, routes.variants[stream.variant]) for route in routes.ranks for stream in route.streams
        ]

    def split(self, kjt: KeyedJaggedTensor) -> Split:
        """Splits every feature of the routes; `kjt` is on the host, and may have others."""
        place, batch, ends = kjt.index_per_key(), kjt.stride(), kjt.offset_per_key()
        values, bags = kjt.values().to(torch.int64), torch.arange(batch)
        lengths_KB = kjt.lengths().view(len(kjt.keys()), batch).to(torch.int64)
        nothing = torch.zeros(0, dtype=torch.int64)
        lengths, ids, numbers = [lengths_KB[:0]], [nothing], [nothing]
        for stream, variant in self._streams:
            key = place[variant.feature]
            number, low, of_bags = torch.arange(ends[key], ends[key + 1]), 0, lengths_KB[key]
            if variant.edges is not None:
                low, high = variant.edges[stream.bucket : stream.bucket + 2]
                inside = (values[number] >= low) & (values[number] < high)
                bag_N = bags.repeat_interleave(of_bags, output_size=number.numel())
                number, of_bags = number[inside], bag_N[inside].bincount(minlength=batch)
            lengths.append(of_bags[None])
            ids.append(values[number] - low)
            numbers.append(number)
        lengths_SB, places = torch.cat(lengths), torch.cat(numbers)
        key_F = [place[feature] for feature in self._features]
        trace = None
        if self._traced:
            sizes_F = lengths_KB[key_F].sum(1)
            shift_K = torch.zeros(len(kjt.keys()), dtype=torch.int64)
            shift_K[key_F] = sizes_F.cumsum(0) - sizes_F - torch.tensor(ends)[key_F]
            trace = Trace(lengths_KB[key_F], places + shift_K.repeat_interleave(lengths_KB.sum(1))[places])
        weights = kjt.weights()[places] if self._weighted else None
        return Split(Ids(lengths_SB, torch.cat(ids), weights), lengths_SB.sum(1), trace)
