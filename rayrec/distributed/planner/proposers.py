"""Proposers, for those who pass one by hand: each walks through choices of one way for every table in its own order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from rayrec.distributed.planner.bases import Enumerator, Proposer
from rayrec.distributed.planner.parts import Proposal, ShardingOption, by_table, bytes_of, cost_of
from rayrec.distributed.planner.topology import Topology

__all__ = [
    "DynamicProgrammingProposer",
    "GreedyProposer",
    "GridSearchProposer",
    "Proposer",
    "UniformProposer",
    "proposers_to_proposals_list",
]


class GreedyProposer(Proposer):
    """Begins with every table's fastest way; then again and again takes the next one of the table that needs most
    memory.

    Args:
        use_depth: a way is as slow as its slowest shard, else as all its shards together.
        threshold: ends after so many proposals in turn that are rated worse than the best one.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth, self._threshold = use_depth, threshold
        self._best, self._worse = math.inf, 0
        self._ways: dict[str, Proposal] = {}
        self._places: dict[str, int] = {}

    def load(self, search_space: Proposal, enumerator: Enumerator | None = None) -> None:
        self._ways = {name: _fastest_first(ways, self._use_depth) for name, ways in by_table(search_space).items()}
        self._places = dict.fromkeys(self._ways, 0)

    def propose(self) -> Proposal | None:
        return [self._ways[name][place] for name, place in self._places.items()] or None

    def feedback(
        self,
        partitionable: bool,
        plan: Proposal | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        if self._threshold and perf_rating:
            self._worse = 0 if perf_rating < self._best else self._worse + 1
            self._best = min(self._best, perf_rating)
            if self._worse > self._threshold:
                self._places = {}
                return
        needs = {
            name: _memory(self._ways[name][place])
            for name, place in self._places.items()
            if place + 1 < len(self._ways[name])
        }
        largest = max(needs, key=lambda name: needs[name], default=None)
        if largest is None or not any(needs[largest]):
            self._places = {}
        else:
            self._places[largest] += 1


class _Listed(Proposer):
    """A proposer whose proposals are known when it has loaded."""

    _proposals: Iterator[Proposal] = iter(())
    _now: Proposal | None = None

    def propose(self) -> Proposal | None:
        return self._now

    def feedback(
        self,
        partitionable: bool,
        plan: Proposal | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        self._now = next(self._proposals, None)

    def _begin(self, proposals: Iterator[Proposal]) -> None:
        self._proposals = proposals
        self._now = next(proposals, None)


class UniformProposer(_Listed):
    """The same sharding type for all tables, one type after the other; of each the fastest way.

    Args:
        use_depth: as of `GreedyProposer`.
    """

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth

    def load(self, search_space: Proposal, enumerator: Enumerator | None = None) -> None:
        names = set(by_table(search_space))
        proposals = []
        for kind in dict.fromkeys(option.sharding_type for option in search_space):
            ways = by_table([option for option in search_space if option.sharding_type == kind])
            if set(ways) == names:
                proposals.append([_fastest_first(each, self._use_depth)[0] for each in ways.values()])
        self._begin(iter(proposals))


class GridSearchProposer(_Listed):
    """Every combination; none where there are more than `max_proposals`."""

    def __init__(self, max_proposals: int = 10_000) -> None:
        self._max_proposals = max_proposals

    def load(self, search_space: Proposal, enumerator: Enumerator | None = None) -> None:
        ways = [_fastest_first(each, True) for each in by_table(search_space).values()]
        few = math.prod(map(len, ways)) <= self._max_proposals
        self._begin(map(list, itertools.product(*ways)) if few else iter(()))


class DynamicProgrammingProposer(Proposer):
    """First the ways that need least device memory; then, for each amount of it that all tables together may take, from
    the largest down, the fastest ones (a knapsack).

    Args:
        hbm_bins_per_device: amounts that are told apart, for each rank.
    """

    def __init__(self, hbm_bins_per_device: int = 100) -> None:
        self._bins = max(hbm_bins_per_device, 1)
        self._ways: list[Proposal] = []
        self._proposals: list[Proposal] | None = None

    def load(self, search_space: Proposal, enumerator: Enumerator | None = None) -> None:
        self._ways = list(by_table(sorted(search_space, key=lambda option: option.total_storage.hbm)).values())

    def propose(self) -> Proposal | None:
        if self._proposals is None:
            return [ways[0] for ways in self._ways]
        return self._proposals[0] if self._proposals else None

    def feedback(
        self,
        partitionable: bool,
        plan: Proposal | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        if self._proposals is None:
            assert storage_constraint is not None
            self._proposals = self._knapsack(storage_constraint)
        else:
            self._proposals = self._proposals[1:]

    def _knapsack(self, topology: Topology) -> list[Proposal]:
        """For each bin of bytes the fastest choice that ends in it, the fullest bin first."""
        count = self._bins * len(topology.devices)
        width = sum(device.storage.hbm for device in topology.devices) / count
        best: dict[int, tuple[float, float, Proposal]] = {0: (0.0, 0.0, [])}  # bin: ms, bytes in bins, ways
        for ways in self._ways:
            longer: dict[int, tuple[float, float, Proposal]] = {}
            for way in ways:
                for _, (time, held, chosen) in sorted(best.items()):
                    bins = held + way.total_storage.hbm / width
                    total = time + way.total_perf
                    if bins < count and (int(bins) not in longer or total < longer[int(bins)][0]):
                        longer[int(bins)] = (total, bins, [*chosen, way])
            best = longer
        return [chosen for _, (_, _, chosen) in sorted(best.items(), reverse=True)]


def proposers_to_proposals_list(proposers_list: list[Proposer], search_space: Proposal) -> list[Proposal]:
    """All proposals of proposers that need no feedback, each once."""
    found: list[Proposal] = []
    seen: set[tuple[int, ...]] = set()
    for proposer in proposers_list:
        proposer.load(search_space)
        while (proposal := proposer.propose()) is not None:
            key = tuple(sorted(map(hash, proposal)))
            if key not in seen:
                seen.add(key)
                found.append(proposal)
            proposer.feedback(True)
    return found


def _fastest_first(ways: Proposal, use_depth: bool) -> Proposal:
    combine = max if use_depth else sum
    return sorted(ways, key=lambda way: combine([cost_of(shard).total for shard in way.shards]))


def _memory(way: ShardingOption) -> tuple[float, ...]:
    """Device memory of the largest shard and of all, then the host's."""
    hbm, ddr = ([getattr(bytes_of(shard), kind) for shard in way.shards] for kind in ("hbm", "ddr"))
    return (max(hbm), sum(hbm), max(ddr), sum(ddr))
