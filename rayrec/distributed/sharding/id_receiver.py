"""Ids from all ranks, in the order of this rank's lookups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from rayrec.distributed.kernel import Lookups
from rayrec.distributed.sharding.id_message import BATCH, GROUPS, Part
from rayrec.distributed.sharding.routing import Routes
from rayrec.sparse import ops


@dataclass(frozen=True)
class RoutedIds:
    """What this rank looks up.

    Args:
        lookups: for each kernel group that this rank has, the ids of its lookups over the global batch.
        batch_sizes: examples of each rank, in rank order.
        row_counts: for each rank, the counts it announced in its header.
        asked: for each rank, how many of its ids this rank looks up, by kernel group.
        sent: for each rank, how many of this rank's ids it looks up, by kernel group.
        weights: all arrived weights where they need gradients; backward must reach them on every rank.
    """

    lookups: Mapping[int, Lookups]
    batch_sizes: list[int]
    row_counts: list[list[int]]
    asked: list[list[int]]
    sent: list[list[int]] = field(default_factory=list)
    weights: torch.Tensor | None = None


class Receiver:
    """Puts what arrives in the order of this rank's lookups: lookup after lookup, rank after rank.

    Args:
        sources: the order in which ranks come after one another; by default rank order.
    """

    def __init__(self, routes: Routes, rank: int, device: torch.device, sources: Sequence[int] | None = None) -> None:
        route = routes.ranks[rank]
        self._first_count = GROUPS + routes.num_groups
        self._device, self._streams = device, len(route.streams)
        self._groups = [(group, len(route.lookups_of(group))) for group in route.tables]
        world, streams = len(routes.ranks), len(route.streams)
        in_turn = range(world) if sources is None else sources
        order = [source * streams + lookup.stream for lookup in route.lookups for source in in_turn]
        self._order = torch.tensor(order, dtype=torch.int32, device=device)
        self._in_order = order == list(range(world * streams))

    def counts(self, headers: Sequence[Sequence[int]]) -> list[list[int]]:
        """For each header the ids of each kernel group."""
        return [list(header[GROUPS : self._first_count]) for header in headers]

    def chunks(self, headers: Sequence[Sequence[int]]) -> torch.Tensor | None:
        """Examples of each stream of each rank, on the host; None where all ranks have equally many."""
        batch_sizes = [header[BATCH] for header in headers]
        if len(set(batch_sizes)) == 1:
            return None
        return torch.tensor(batch_sizes, dtype=torch.int32).repeat_interleave(self._streams)

    def order(
        self, parts: Sequence[Part], headers: Sequence[Sequence[int]], chunks: torch.Tensor | None = None
    ) -> RoutedIds:
        """This rank's lookups.

        Args:
            parts: every rank's.
            headers: every rank's.
            chunks: of these headers, where ids lie on a GPU; by default they are made here.
        """
        batch_sizes = [header[BATCH] for header in headers]
        row_counts = [list(header[self._first_count :]) for header in headers]
        asked = self.counts(headers)
        if not self._groups:
            return RoutedIds({}, batch_sizes, row_counts, asked)
        first = parts[0]
        values = first.values if len(parts) == 1 else torch.cat([part.values for part in parts])
        weights = None
        if first.weights is not None:
            weights = torch.cat([part.weights for part in parts if part.weights is not None])
        counts = {group: sum(header[GROUPS + group] for header in headers) for group, _ in self._groups}
        num_values, chunks = sum(counts.values()), self.chunks(headers) if chunks is None else chunks
        lengths, values, weights = self._permuted(parts, values, weights, chunks, num_values)
        offsets = ops.complete_cumsum(lengths.to(values.dtype))
        lookups = self._by_group(offsets, values, weights, counts, sum(batch_sizes))
        return RoutedIds(lookups, batch_sizes, row_counts, asked)

    def _permuted(
        self,
        parts: Sequence[Part],
        values: torch.Tensor,
        weights: torch.Tensor | None,
        chunks: torch.Tensor | None,
        num_values: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if chunks is None:
            lengths_RB = parts[0].lengths_SB if len(parts) == 1 else torch.cat([part.lengths_SB for part in parts])
            if self._in_order:
                return lengths_RB.reshape(-1), values, weights
            lengths, values, weights = ops.permute_segments(self._order, lengths_RB, values, weights, num_values)
            return lengths.view(-1), values, weights
        # ranks brought batches of different size: rows are chunks of unequal length
        lengths = torch.cat([part.lengths_SB.reshape(-1) for part in parts])
        totals = torch.cat([part.lengths_SB.sum(1, dtype=torch.int32) for part in parts])
        num_lengths = sum(num for _, num in self._groups) * sum(part.lengths_SB.shape[1] for part in parts)
        return (
            ops.permute_chunks(self._order, chunks, lengths, num_values=num_lengths),
            ops.permute_chunks(self._order, totals, values, num_values=num_values),
            None if weights is None else ops.permute_chunks(self._order, totals, weights, num_values=num_values),
        )

    def _by_group(
        self,
        offsets: torch.Tensor,
        values: torch.Tensor,
        weights: torch.Tensor | None,
        counts: Mapping[int, int],
        batch: int,
    ) -> dict[int, Lookups]:
        if len(self._groups) == 1:
            return {self._groups[0][0]: Lookups(values, offsets, weights)}
        out, bag, value = {}, 0, 0
        for group, num_lookups in self._groups:
            next_bag, next_value = bag + num_lookups * batch, value + counts[group]
            part = None if weights is None else weights[value:next_value]
            out[group] = Lookups(values[value:next_value], offsets[bag : next_bag + 1] - offsets[bag], part)
            bag, value = next_bag, next_value
        return out
