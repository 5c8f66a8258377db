"""Proposers, which list combinations of one option per table, in different orders."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from rayrec.torchrec.distributed.planner.bases import Enumerator, Proposer
from rayrec.torchrec.distributed.planner.parts import Proposal, ShardingOption, by_table, bytes_of, cost_of
from rayrec.torchrec.distributed.planner.topology import Topology
from rayrec.torchrec.not_offered import names_left_out

__getattr__ = names_left_out(__name__)

__all__ = [
    "DynamicProgrammingProposer",
    "GreedyProposer",
    "GridSearchProposer",
    "Proposer",
    "UniformProposer",
    "proposers_to_proposals_list",
]


class GreedyProposer(Proposer):
    """Starts with the fastest option of each table; each step advances the table that uses most memory.

    Args:
        use_depth: rate an option by its slowest shard; otherwise by the sum of its shards.
        threshold: stop after this many proposals in a row that are worse than the best.
    """

    def __init__(self, use_depth: bool = True, threshold: int | None = None) -> None:
        self._use_depth, self._threshold = use_depth, threshold
        self._best, self._worse = math.inf, 0
        self._options: dict[str, Proposal] = {}
        self._positions: dict[str, int] = {}

    def load(self, search_space: Proposal, enumerator: Enumerator | None = None) -> None:
        self._options = {
            name: _fastest_first(options, self._use_depth) for name, options in by_table(search_space).items()
        }
        self._positions = dict.fromkeys(self._options, 0)

    def propose(self) -> Proposal | None:
        return [self._options[name][position] for name, position in self._positions.items()] or None

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
                self._positions = {}
                return
        memory = {
            name: _memory(self._options[name][position])
            for name, position in self._positions.items()
            if position + 1 < len(self._options[name])
        }
        largest = max(memory, key=lambda name: memory[name], default=None)
        if largest is None or not any(memory[largest]):
            self._positions = {}
        else:
            self._positions[largest] += 1


class _ListProposer(Proposer):
    """A proposer with a fixed sequence of proposals after `load`."""

    _proposals: Iterator[Proposal] = iter(())
    _current: Proposal | None = None

    def propose(self) -> Proposal | None:
        return self._current

    def feedback(
        self,
        partitionable: bool,
        plan: Proposal | None = None,
        perf_rating: float | None = None,
        storage_constraint: Topology | None = None,
    ) -> None:
        self._current = next(self._proposals, None)

    def _start(self, proposals: Iterator[Proposal]) -> None:
        self._proposals = proposals
        self._current = next(proposals, None)


class UniformProposer(_ListProposer):
    """Proposes one sharding type for all tables, for each type in turn, with the fastest option of each table.

    Args:
        use_depth: see `GreedyProposer`.
    """

    def __init__(self, use_depth: bool = True) -> None:
        self._use_depth = use_depth

    def load(self, search_space: Proposal, enumerator: Enumerator | None = None) -> None:
        names = set(by_table(search_space))
        proposals = []
        for kind in dict.fromkeys(option.sharding_type for option in search_space):
            options = by_table([option for option in search_space if option.sharding_type == kind])
            if set(options) == names:
                proposals.append([_fastest_first(choices, self._use_depth)[0] for choices in options.values()])
        self._start(iter(proposals))


class GridSearchProposer(_ListProposer):
    """Proposes every combination, or none if there are more than `max_proposals`."""

    def __init__(self, max_proposals: int = 10_000) -> None:
        self._max_proposals = max_proposals

    def load(self, search_space: Proposal, enumerator: Enumerator | None = None) -> None:
        options = [_fastest_first(choices, True) for choices in by_table(search_space).values()]
        feasible = math.prod(map(len, options)) <= self._max_proposals
        self._start(map(list, itertools.product(*options)) if feasible else iter(()))


class DynamicProgrammingProposer(Proposer):
    """Proposes the options with the least device memory; then, for each memory budget in descending order, the fastest
    options (a knapsack).

    Args:
        hbm_bins_per_device: number of memory budgets per rank.
    """

    def __init__(self, hbm_bins_per_device: int = 100) -> None:
        self._bins = max(hbm_bins_per_device, 1)
        self._options: list[Proposal] = []
        self._proposals: list[Proposal] | None = None

    def load(self, search_space: Proposal, enumerator: Enumerator | None = None) -> None:
        self._options = list(by_table(sorted(search_space, key=lambda option: option.total_storage.hbm)).values())

    def propose(self) -> Proposal | None:
        if self._proposals is None:
            return [options[0] for options in self._options]
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
        """Return the fastest choice of each memory bin, largest bin first."""
        count = self._bins * len(topology.devices)
        width = sum(device.storage.hbm for device in topology.devices) / count
        best: dict[int, tuple[float, float, Proposal]] = {0: (0.0, 0.0, [])}  # bin: ms, bytes in bins, options
        for options in self._options:
            extended: dict[int, tuple[float, float, Proposal]] = {}
            for option in options:
                for _, (time, used, proposal) in sorted(best.items()):
                    bins = used + option.total_storage.hbm / width
                    total = time + option.total_perf
                    if bins < count and (int(bins) not in extended or total < extended[int(bins)][0]):
                        extended[int(bins)] = (total, bins, [*proposal, option])
            best = extended
        return [proposal for _, (_, _, proposal) in sorted(best.items(), reverse=True)]


def proposers_to_proposals_list(proposers_list: list[Proposer], search_space: Proposal) -> list[Proposal]:
    """Return all distinct proposals of proposers that need no feedback."""
    distinct: dict[tuple[int, ...], Proposal] = {}
    for proposer in proposers_list:
        proposer.load(search_space)
        while (proposal := proposer.propose()) is not None:
            distinct.setdefault(tuple(sorted(map(hash, proposal))), proposal)
            proposer.feedback(True)
    return list(distinct.values())


def _fastest_first(options: Proposal, use_depth: bool) -> Proposal:
    combine = max if use_depth else sum
    return sorted(options, key=lambda option: combine([cost_of(shard).total for shard in option.shards]))


def _memory(option: ShardingOption) -> tuple[float, ...]:
    """Return the device memory of the largest shard and in total, then the same for host memory."""
    hbm, ddr = ([getattr(bytes_of(shard), kind) for shard in option.shards] for kind in ("hbm", "ddr"))
    return (max(hbm), sum(hbm), max(ddr), sum(ddr))
