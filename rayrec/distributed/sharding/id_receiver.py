"""Ids from all ranks, in the order of this rank's lookups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from rayrec.distributed.kernel import Lookups
from rayrec.distributed.sharding.id_message import BATCH, GROUPS, Part
from rayrec.distributed.sharding.routing import Routes
from rayrec.sparse import ops


@dataclass(frozen=True)
class Trace:
    """Where this rank's own ids went, so that vectors can be put back in their places.

    Args:
        lengths_F: ids of each of the routes' features.
        lengths_S: ids of each stream that was sent: the streams of rank 0, then of rank 1 …
        origins: for each id sent, its place among the ids of the features.
        asked: for each rank, how many of its ids this rank looks up, by kernel group.
        sent: for each rank, how many of this rank's ids it looks up, by kernel group.
    """

    lengths_F: torch.Tensor
    lengths_S: torch.Tensor
    origins: torch.Tensor
    asked: list[list[int]]
    sent: list[list[int]]


@dataclass(frozen=True)
class RoutedIds:
    """What this rank looks up.

    Args:
        lookups: for each kernel group that this rank has, the ids of its lookups over the global batch.
        batch_sizes: examples of each rank, in rank order.
        row_counts: for each rank, the counts it announced in its header.
        trace: where this rank's own ids went, if the exchange keeps track.
        weights: all arrived weights where they need gradients; backward must reach them on every rank.
    """

    lookups: Mapping[int, Lookups]
    batch_sizes: list[int]
    row_counts: list[list[int]]
    trace: Trace | None = None
    weights: torch.Tensor | None = None


class Receiver:
    """Puts what arrives in the order of this rank's lookups: lookup after lookup, rank after rank.

    Args:
        sources: the order in which ranks come after one another; by default rank order.
    """

    def __init__(self, routes: Routes, rank: int, device: torch.device, sources: Sequence[int] | None = None) -> None:
        route = routes.ranks[rank]
        self._first_count = GROUPS + routes.num_groups
        self._groups = [(group, len(route.lookups_of(group))) for group in route.tables]
        world, streams = len(routes.ranks), len(route.streams)
        in_turn = range(world) if sources is None else sources
        order = [source * streams + lookup.stream for lookup in route.lookups for source in in_turn]
        self._order = torch.tensor(order, dtype=torch.int32, device=device)
        self._in_order = order == list(range(world * streams))

    def order(self, parts: Sequence[Part], headers: Sequence[Sequence[int]]) -> RoutedIds:
        batch_sizes = [header[BATCH] for header in headers]
        row_counts = [list(header[self._first_count :]) for header in headers]
        if not self._groups:
            return RoutedIds({}, batch_sizes, row_counts)
        first = parts[0]
        values = first.values if len(parts) == 1 else torch.cat([part.values for part in parts])
        weights = None
        if first.weights is not None:
            weights = torch.cat([part.weights for part in parts if part.weights is not None])
        counts = {group: sum(header[GROUPS + group] for header in headers) for group, _ in self._groups}
        lengths, values, weights = self._permuted(parts, values, weights, batch_sizes, sum(counts.values()))
        offsets = ops.complete_cumsum(lengths.to(values.dtype))
        lookups = self._by_group(offsets, values, weights, counts, sum(batch_sizes))
        return RoutedIds(lookups, batch_sizes, row_counts)

    def _permuted(
        self,
        parts: Sequence[Part],
        values: torch.Tensor,
        weights: torch.Tensor | None,
        batch_sizes: Sequence[int],
        num_values: int,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        if len(set(batch_sizes)) == 1:
            lengths_RB = parts[0].lengths_SB if len(parts) == 1 else torch.cat([part.lengths_SB for part in parts])
            if self._in_order:
                return lengths_RB.reshape(-1), values, weights
            lengths, values, weights = ops.permute_segments(self._order, lengths_RB, values, weights, num_values)
            return lengths.view(-1), values, weights
        # ranks brought batches of different size: rows are chunks of unequal length
        lengths = torch.cat([part.lengths_SB.reshape(-1) for part in parts])
        streams = parts[0].lengths_SB.shape[0]
        sizes = torch.tensor(batch_sizes, dtype=torch.int32, device=lengths.device).repeat_interleave(streams)
        totals = torch.cat([part.lengths_SB.sum(1, dtype=torch.int32) for part in parts])
        return (
            ops.permute_chunks(self._order, sizes, lengths),
            ops.permute_chunks(self._order, totals, values),
            None if weights is None else ops.permute_chunks(self._order, totals, weights),
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
