"""Which ways to shard all tables are proposed, and where partitioners put their shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from rayrec.torchrec.distributed.planner import Topology
from rayrec.torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner, SortBy
from rayrec.torchrec.distributed.planner.parts import (
    Perf,
    PlannerError,
    Proposal,
    Shard,
    ShardingOption,
    Storage,
    by_table,
)
from rayrec.torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    GreedyProposer,
    GridSearchProposer,
    Proposer,
    UniformProposer,
    proposers_to_proposals_list,
)

GIB = 1 << 30
PLACED_BY = {"table_wise": "device", "row_wise": "uniform", "table_row_wise": "host", "grid_shard": "multi_host"}


def way(name: str, kind: str, shards: list[tuple[float, float]], path: str = "ebc", **more: Any) -> ShardingOption:
    """A table whose shards have these (GiB, ms)."""
    return ShardingOption(
        name,
        torch.empty(10, 8, device="meta"),
        (path, nn.Module()),
        [1.0],
        64,
        kind,
        PLACED_BY[kind],
        "fused",
        [
            Shard([10, 4], [0, 4 * place], Storage(0, int(held * GIB)), Perf(ms, 0.0, 0.0, 0.0))
            for place, (held, ms) in enumerate(shards)
        ],
        **more,
    )


def placed(options: list[ShardingOption], hosts: int = 3, gib: float = 8) -> list[list[int | None]]:
    topology = Topology(2 * hosts, "cpu", local_world_size=2, ddr_cap=int(gib * GIB))
    return [option.get_shards_assignment() for option in GreedyPerfPartitioner().partition(options, topology)]


def test_a_shard_goes_where_least_is_done_and_there_is_room() -> None:
    full = way("full", "table_wise", [(7, 0.0)])  # nothing to do there, and no room
    assert placed([full, way("t", "table_wise", [(2, 1.0)])]) == [[0], [2]]
    assert placed([full, way("t", "table_wise", [(1, 1.0)])]) == [[0], [0]]
    assert placed([way(name, "table_wise", [(1, 1.0)]) for name in "abc"]) == [[0], [2], [4]]  # the first of each host
    busy = way("busy", "row_wise", [(0, 1.0), (0, 2.0), (0, 3.0), (0, 4.0), (0, 0.5), (0, 9.0)])
    assert placed([busy, way("t", "table_wise", [(2, 1.0)])])[1] == [4]


def test_a_host_without_room_is_passed_over() -> None:
    full = way("full", "table_wise", [(7, 0.0)])
    assert placed([full, way("t", "table_row_wise", [(2, 1.0)] * 2)])[1] == [2, 3]
    assert placed([full, way("t", "table_row_wise", [(1, 1.0)] * 2)])[1] == [0, 1]
    with pytest.raises(PlannerError, match=r"ebc\.t: no host has enough free memory"):
        placed([way("t", "table_row_wise", [(9, 1.0)] * 2)])


def test_columns_over_hosts_begin_where_they_fit() -> None:
    full = way("full", "table_wise", [(7, 0.0)])
    assert placed([full, way("t", "grid_shard", [(1.5, 1.0)] * 4)])[1] == [2, 3, 4, 5]
    assert placed([full, way("t", "grid_shard", [(1, 1.0)] * 4)])[1] == [0, 1, 2, 3]
    assert placed([way("t", "grid_shard", [(1, 1.0)] * 6)])[0] == [0, 1, 2, 3, 4, 5]
    assert placed([way("t", "grid_shard", [(1, 1.0)] * 8)], hosts=2)[0] == [0, 1, 2, 3, 0, 1, 2, 3]
    with pytest.raises(PlannerError, match=r"ebc\.t: no 2 hosts have enough free memory"):
        placed([full, way("t", "grid_shard", [(1.5, 1.0)] * 4)], hosts=2)
    with pytest.raises(PlannerError, match="3 shards must be a multiple of the 2 ranks of a host"):
        placed([way("t", "grid_shard", [(1, 1.0)] * 3)])


def test_one_shard_on_each_rank_needs_room_on_each() -> None:
    with pytest.raises(PlannerError, match="on rank 5"):
        placed([way("t", "row_wise", [(8, 1.0)] * 5 + [(9, 1.0)])])
    with pytest.raises(PlannerError, match="t has 5 shards for 6 ranks"):
        placed([way("t", "row_wise", [(1, 1.0)] * 5)])


def dealt(partitioner: GreedyPerfPartitioner, *options: ShardingOption) -> list[list[int | None]]:
    return [option.get_shards_assignment() for option in partitioner.partition([*options], Topology(2, "cpu"))]


def test_which_tables_go_first() -> None:
    heavy, slow = ("heavy", "table_wise", [(3, 1.0)]), ("slow", "table_wise", [(1, 2.0)])
    assert dealt(GreedyPerfPartitioner(), way(*heavy), way(*slow)) == [[0], [1]]
    assert dealt(GreedyPerfPartitioner(SortBy.PERF), way(*heavy), way(*slow)) == [[1], [0]]
    lone = ("lone", "table_wise", [(1, 1.0)])
    for balance, ranks in [((), [[0], [1], [0]]), ((SortBy.STORAGE, True), [[1], [0], [0]])]:
        assert dealt(GreedyPerfPartitioner(*balance), way(*heavy), way(*slow), way(*lone, path="other")) == ranks


def on_rank_0(partitioner: MemoryBalancedPartitioner, mib: list[float]) -> float:
    """Of tables that cost no time, which all lie on rank 0 as long as they have room there."""
    options = [way(f"t{n:02}", "table_wise", []) for n in range(len(mib))]
    for option, held in zip(options, mib, strict=True):
        option.shards = [Shard([10, 4], [0, 0], Storage(int(held * 2**20), 0), Perf(0.0, 0.0, 0.0, 0.0))]
    placed = partitioner.partition(options, Topology(2, "cuda", hbm_cap=1 << 30))
    return sum(held for option, held in zip(placed, mib, strict=True) if option.shards[0].rank == 0)


@pytest.mark.parametrize(("tries", "held"), [(0, 128), (1, 96), (2, 80), (3, 64), (10, 64)])
def test_memory_is_balanced_by_bisection(tries: int, held: int) -> None:
    """Between 64 and 128: 96 fits, 80 does, 72 (of which 16 a table fill 64) does."""
    assert on_rank_0(MemoryBalancedPartitioner(tries), [16.0] * 8) == held


def test_memory_is_balanced_to_ten_mib_and_by_ten_tries() -> None:
    assert on_rank_0(MemoryBalancedPartitioner(), [1.0] * 20) == 20, "10 more than half"
    assert on_rank_0(MemoryBalancedPartitioner(), [1.0] * 21) == 15


@pytest.mark.parametrize(("ms", "held"), [(4.0, 40), (4.1, 80)])
def test_memory_is_balanced_where_a_plan_is_two_percent_slower_and_no_more(ms: float, held: int) -> None:
    """Two tables of 40 MiB beside one without, which the last one joins if the other rank is full: 200 ms or 204."""
    sizes = [(0, 100 + ms), (40, 100.0), (40, 100.0)]
    options = [way(f"t{n}", "table_wise", []) for n in range(3)]
    for option, (mib, each) in zip(options, sizes, strict=True):
        option.shards = [Shard([10, 4], [0, 0], Storage(mib << 20, 0), Perf(each, 0.0, 0.0, 0.0))]
    found = MemoryBalancedPartitioner().partition(options, Topology(2, "cuda", hbm_cap=1 << 30))
    assert sum(mib for option, (mib, _) in zip(found, sizes, strict=True) if option.shards[0].rank == 1) == held


plain = settings(max_examples=40)


def ways(name: str, *each: Sequence[tuple[int, float]], kinds: Sequence[str] = ()) -> Proposal:
    """A table's ways; of each the (bytes, ms) of its shards."""
    found = []
    for place, shards in enumerate(each):
        option = way(name, kinds[place] if kinds else "table_wise", [])
        option.shards = [Shard([1, place], [0, 0], Storage(held, 0), Perf(ms, 0.0, 0.0, 0.0)) for held, ms in shards]
        found.append(option)
    return found


def walk(proposer: Proposer, space: Proposal, topology: Topology | None = None, ratings: Any = ()) -> list[Proposal]:
    """All that is proposed, when proposals get these ratings and then none."""
    proposer.load(space)
    rated, found = iter(ratings), []
    while (proposal := proposer.propose()) is not None:
        found.append(proposal)
        proposer.feedback(False, proposal, next(rated, None), topology)
    return found


def walked(proposer: Proposer, space: Proposal, ratings: Any = ()) -> list[list[int]]:
    """Of each proposal, which way of its table each one is."""
    number = {id(way): place for each in by_table(space).values() for place, way in enumerate(each)}
    return [[number[id(way)] for way in proposal] for proposal in walk(proposer, space, ratings=ratings)]


FALLING = ways("t", *([(90 - n, float(n))] for n in range(9)))  # the slower, the fewer bytes


@pytest.mark.parametrize(
    ("threshold", "ratings", "count"),
    [
        (None, [1.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0, 2.0], 9),
        (2, [], 9),  # nothing fitted, so nothing was rated
        (2, [5.0, 6.0, 7.0, 8.0, 9.0], 4),
        (2, [5.0, 5.0, 5.0, 5.0], 4),  # as good as the best is no better
        (2, [5.0, 6.0, 4.0, 4.5, 4.5, 4.1], 6),  # a better one begins the count anew
        (2, [5.0, 6.0, 5.5, 4.9, 6.0], 9),
        (1, [5.0, 6.0, 7.0], 3),
    ],
)
def test_a_greedy_walk_ends_after_so_many_worse_proposals(threshold: Any, ratings: Any, count: int) -> None:
    assert walked(GreedyProposer(threshold=threshold), FALLING, ratings) == [[n] for n in range(count)]


def test_a_greedy_walk_changes_the_table_that_needs_most_memory() -> None:
    space = ways("t", [(50, 1.0)], [(5, 2.0)], [(1, 3.0)]) + ways("u", [(20, 1.0)], [(2, 2.0)])
    assert walked(GreedyProposer(), space) == [[0, 0], [1, 0], [1, 1], [2, 1]]
    assert walked(GreedyProposer(), ways("t", [(0, 1.0)], [(0, 2.0)])) == [[0]], "no memory is saved by another way"


def test_a_way_is_as_slow_as_its_slowest_shard_or_as_all_of_them() -> None:
    space = ways("t", [(9, 3.0), (9, 3.0)], [(9, 4.0)])
    for make in (GreedyProposer, UniformProposer):
        assert walked(make(), space)[0] == walked(make(use_depth=True), space)[0] == [0]
        assert walked(make(use_depth=False), space)[0] == [1]
    assert walked(GridSearchProposer(), space) == [[0], [1]]


def test_one_kind_for_all_tables_needs_all_tables_to_have_it() -> None:
    kinds = ["row_wise", "table_wise", "table_wise"]
    space = ways("t", [(1, 1.0)], [(1, 3.0)], [(1, 2.0)], kinds=kinds) + ways("u", [(1, 1.0)], kinds=["table_wise"])
    assert walked(UniformProposer(), space) == [[2, 0]]


def test_a_grid_of_as_many_proposals_as_allowed_is_walked_and_no_larger_one() -> None:
    space = ways("t", [(1, 1.0)], [(1, 2.0)]) + ways("u", [(1, 1.0)], [(1, 2.0)], [(1, 3.0)])
    assert walked(GridSearchProposer(6), space) == [list(pair) for pair in product(range(2), range(3))]
    assert walked(GridSearchProposer(5), space) == []


weights = st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 1 << 40)), min_size=1, max_size=4), max_size=4)


@plain
@given(weights.filter(len), st.integers(1, 4))
def test_a_knapsack_finds_the_fastest_of_all_choices_with_as_many_bytes(drawn: Any, bins: int) -> None:
    """Bytes are whole bins, so that nothing is rounded; after the choice with least bytes, the fullest first."""
    space = [one for n, each in enumerate(drawn) for one in ways(f"t{n}", *([(100 * h, float(ms))] for h, ms in each))]
    fastest: dict[int, float] = {}
    for picked in product(*drawn):
        held, ms = sum(h for h, _ in picked), float(sum(ms for _, ms in picked))
        if held < 3 * bins:
            fastest[held] = min(ms, fastest.get(held, math.inf))
    first, *others = walk(DynamicProgrammingProposer(bins), space, Topology(3, "cuda", hbm_cap=100 * bins))
    assert sum(way.total_storage.hbm for way in first) == 100 * sum(min(h for h, _ in each) for each in drawn)
    told = [(sum(way.total_storage.hbm for way in p) // 100, sum(way.total_perf for way in p)) for p in others]
    assert told == sorted(fastest.items(), reverse=True)


def test_proposals_of_several_proposers_are_listed_once_and_told_to_fit() -> None:
    space = ways("t", [(1, 1.0)], [(1, 2.0)])
    told = []

    class Noted(GridSearchProposer):
        def feedback(self, partitionable: bool, *more: Any, **named: Any) -> None:
            told.append(partitionable)
            super().feedback(partitionable)

    listed = proposers_to_proposals_list([UniformProposer(), Noted(), UniformProposer()], space)
    assert listed == [[space[0]], [space[1]]] and told == [True, True]


def test_a_knapsack_tells_a_hundred_amounts_apart() -> None:
    assert DynamicProgrammingProposer()._bins == 100
    assert [DynamicProgrammingProposer(bins)._bins for bins in (0, 1, 7)] == [1, 1, 7]
