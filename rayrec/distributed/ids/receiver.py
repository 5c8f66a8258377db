"""Ids from all ranks, in the order of this rank's lookups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.ids.message import BATCH, GROUPS, Headers, Ids
from rayrec.distributed.ids.routes import Routes
from rayrec.distributed.kernel import Lookups
from rayrec.sparse import ops


@dataclass(frozen=True)
class Asked:
    """What this rank asked of all: headers; and where vectors that come back belong, see `PlaceFinder`;
    None where they are in order, or nobody asks."""

    headers: Headers
    units: torch.Tensor | None


@dataclass(frozen=True)
class RoutedIds:
    """What this rank looks up.

    Args:
        lookups: for each kernel group that this rank has, the ids of its lookups over the global batch.
        received: headers of every rank for this one.
        told: for each rank, the counts of its notice.
        weights: all arrived weights where they need gradients; backward must reach them on every rank.
        asked: what this rank waits for in its turn.
    """

    lookups: Mapping[int, Lookups]
    received: Headers
    told: list[list[int]]
    weights: torch.Tensor | None
    asked: Asked

    @property
    def batch_sizes(self) -> list[int]:
        """Examples of each rank, in rank order."""
        return [header[BATCH] for header in self.received]


class Receiver:
    """Puts what arrives in the order of this rank's lookups.

    Args:
        routes: of the collection.
        rank: of this process.
        device: where ids lie.
        sources: the order in which ranks come after one another.
        rank_by_rank: within a kernel group a rank's lookups come one after the other; else a lookup's ranks.
    """

    def __init__(
        self, routes: Routes, rank: int, device: torch.device, sources: Sequence[int], rank_by_rank: bool
    ) -> None:
        route = routes.ranks[rank]
        self._device, self._streams = device, len(route.streams)
        lookups = {group: route.lookups_of(group) for group in route.tables}
        self._groups = [(group, len(held)) for group, held in lookups.items()]
        order = []
        for held in lookups.values():
            if rank_by_rank:
                order += [source * self._streams + lookup.stream for source in sources for lookup in held]
            else:
                order += [source * self._streams + lookup.stream for lookup in held for source in sources]
        self._order = torch.tensor(order, dtype=torch.int32, device=device)
        self._num_rows = len(routes.ranks) * self._streams
        self._in_order = order == list(range(self._num_rows))

    def chunks(self, received: Headers) -> torch.Tensor | None:
        """Examples of each stream of each rank, on the host; None where all ranks have equally many."""
        batch_sizes = [header[BATCH] for header in received]
        if len(set(batch_sizes)) == 1:
            return None
        return torch.tensor(batch_sizes, dtype=torch.int32).repeat_interleave(self._streams)

    def order(self, ids: Ids, received: Headers, chunks: torch.Tensor | None) -> dict[int, Lookups]:
        """This rank's lookups, by kernel group.

        Args:
            ids: of every rank, lists rank after rank and stream after stream.
            received: every rank's header.
            chunks: of these headers, on the device.
        """
        if not self._groups:
            return {}
        batch = sum(header[BATCH] for header in received)
        counts = {group: sum(header[GROUPS + group] for header in received) for group, _ in self._groups}
        lengths, values, weights = self._permuted(ids, chunks, sum(counts.values()))
        offsets = ops.complete_cumsum(lengths.to(values.dtype))
        if len(self._groups) == 1:
            return {self._groups[0][0]: Lookups(values, offsets, weights)}
        out, bag, value = {}, 0, 0
        for group, num_lookups in self._groups:
            next_bag, next_value = bag + num_lookups * batch, value + counts[group]
            part = None if weights is None else weights[value:next_value]
            out[group] = Lookups(values[value:next_value], offsets[bag : next_bag + 1] - offsets[bag], part)
            bag, value = next_bag, next_value
        return out

    def _permuted(
        self, ids: Ids, chunks: torch.Tensor | None, num_values: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        lengths, values, weights = ids.lengths.reshape(-1), ids.values, ids.weights
        if chunks is None:
            if self._in_order:
                return lengths, values, weights
            lengths_RB = lengths.view(self._num_rows, lengths.numel() // self._num_rows)
            lengths, values, weights = ops.permute_segments(self._order, lengths_RB, values, weights, num_values)
            return lengths.view(-1), values, weights
        # ranks brought batches of different size: rows are chunks of unequal length
        ends = chunks.cumsum(0)
        starts = ops.complete_cumsum(lengths)
        totals = (starts[ends] - starts[ends - chunks]).to(torch.int32)
        num_lengths = sum(num for _, num in self._groups) * (lengths.numel() // self._streams)
        return (
            ops.permute_chunks(self._order, chunks, lengths, num_values=num_lengths),
            ops.permute_chunks(self._order, totals, values, num_values=num_values),
            None if weights is None else ops.permute_chunks(self._order, totals, weights, num_values=num_values),
        )
