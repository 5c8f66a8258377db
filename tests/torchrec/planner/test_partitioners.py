"""Where partitioners put shards when the first place that comes to mind has no room."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from rayrec.torchrec.distributed.planner import Topology
from rayrec.torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner, SortBy
from rayrec.torchrec.distributed.planner.parts import Perf, PlannerError, Shard, ShardingOption, Storage

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
