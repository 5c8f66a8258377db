"""Planning for replicated sharding groups: the machine of one, what synchronisation costs, how many are best."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from rayrec.distributed.planner import NoPlanError, ParameterConstraints, PlanResult, Topology, plan_tables
from rayrec.distributed.planner.sharding_groups import choose_groups, group_topology, grouped
from rayrec.distributed.replicas import GroupLayout
from rayrec.modules import EmbeddingBagConfig
from tests.planner.problems import SHARDER, plan_of, table

TABLE = EmbeddingBagConfig(name="t", num_embeddings=1_000_000, embedding_dim=16, feature_names=["f"])
ROW_WISE = {"t": ParameterConstraints(sharding_types=["row_wise"])}


def planned(topology: Topology, table: EmbeddingBagConfig = TABLE) -> PlanResult:
    return plan_tables([table], topology, ROW_WISE, batch_size=256)


def test_groups_are_cut_from_the_ranks_in_both_ways() -> None:
    near, far = GroupLayout(8, 4), GroupLayout(8, 4, strided=True)
    assert [list(near.group_of(5)), list(near.replicas_of(5))] == [[4, 5, 6, 7], [1, 5]]
    assert [list(far.group_of(5)), list(far.replicas_of(5))] == [[1, 3, 5, 7], [4, 5]]
    for layout in (near, far):
        for rank in range(8):
            assert rank in layout.group_of(rank) and rank in layout.replicas_of(rank)
            assert len({tuple(layout.group_of(other)) for other in layout.replicas_of(rank)}) == layout.replicas
    with pytest.raises(
        ValueError, match=r"8 ranks cannot be divided into 3 replicas of a sharding group; .* 1, 2, 4, 8"
    ):
        GroupLayout.of_replicas(8, 3)


@pytest.mark.parametrize(
    ("hosts", "size", "sizes"),
    [([4, 4], 4, [4]), ([4, 4], 2, [2]), ([3, 3, 2], 4, [3, 1]), ([2, 2, 2, 2], 4, [2, 2]), ([8], 8, [8])],
)
def test_the_machine_of_a_group_is_its_worst(hosts: list[int], size: int, sizes: list[int]) -> None:
    memory = [1000 + place for place in range(len(hosts))]
    topology = Topology(8, "cpu", hosts=hosts, ddr_cap=memory)
    group = group_topology(topology, GroupLayout(8, size))
    assert [host.num_ranks for host in group.hosts] == sizes
    assert size == 8 or all(host.memory_bytes == 1000 for host in group.hosts)
    assert group.device == topology.device
    with pytest.raises(ValueError, match="the layout has 4 ranks, but the topology 8"):
        group_topology(topology, GroupLayout(4, 2))


def test_bytes_of_synchronisation_are_those_of_touched_rows() -> None:
    """256 ids a rank that hardly ever meet; each of two ranks of a group has half of their rows."""
    topology, layout = Topology(4, "cpu", local_world_size=2), GroupLayout(4, 2)
    result = planned(group_topology(topology, layout))
    every_step = grouped(result, layout, topology, 1)
    assert every_step.sync_bytes == pytest.approx(256 * (8 + 64), rel=0.01)
    seldom = grouped(result, layout, topology, 10)
    assert seldom.sync_bytes == pytest.approx(256 * 8 + 2 * 256 * 64, rel=0.01)  # the union of both groups' rows
    assert every_step.step_s > result.estimate.worst_s and seldom.sync_s > 0
    alone = grouped(planned(topology), GroupLayout(4, 4), topology, 1)
    assert alone.sync_bytes == alone.sync_s == 0


def chosen(topology: Topology, sync_every: int, table: EmbeddingBagConfig = TABLE) -> int:
    return choose_groups(lambda own: planned(own, table), topology, sync_every).layout.replicas


def test_as_many_groups_are_chosen_as_make_the_shortest_step() -> None:
    def joined(inter_host_bw: float, **memory: Any) -> Topology:
        topology = Topology(4, "cpu", local_world_size=2, **memory)
        return topology.with_device(replace(topology.device, inter_host_bw=inter_host_bw))

    slow = joined(1e6)
    assert chosen(slow, 1000) > 1  # exchanges stay on hosts
    by_hand = {
        size: grouped(planned(group_topology(slow, layout)), layout, slow, 1000).step_s
        for size in (1, 2, 4)
        for layout in [GroupLayout(4, size)]
    }
    assert chosen(slow, 1000) == 4 // min(by_hand, key=lambda size: by_hand[size])
    fits_four_only = joined(1e6, ddr_cap=30 << 20)  # the table has 64 MB
    assert chosen(fits_four_only, 1000) == 1
    with pytest.raises(NoPlanError):
        chosen(joined(1e6, ddr_cap=5 << 20), 1000)


@pytest.mark.parametrize("every", [1, 10])
@pytest.mark.parametrize("hosts", [[4], [2, 2]])
def test_seconds_of_synchronisation_by_hand(every: int, hosts: list[int]) -> None:
    """Two groups of two ranks; figures of the device that tell each term by its size."""
    topology = Topology(4, "cpu", hosts=hosts)
    speeds = {"inter_host_bw": 10.0, "intra_host_bw": 100.0, "sort_s": 7.0, "replica_bw": 3.0, "memory_bw": 5.0}
    topology = topology.with_device(replace(topology.device, collective_s=1000.0, begin_s=500.0, **speeds))
    layout = GroupLayout(4, 2)
    own = group_topology(topology, layout)
    result = plan_tables([table("t", 1000, 16)], own, batch_size=16, sharder=SHARDER)
    result = replace(result, plan=plan_of("row_wise", [0, 1]))
    one = result.tables[0]
    found = grouped(result, layout, topology, every)

    def touched(ids: float) -> float:
        return 500 * (1 - math.exp(-ids / 500))

    n, link = touched(every * one.ids / 2), 100.0 if len(hosts) == 1 else 10.0
    if every == 1:
        moved, work = n * (8 + 64), 2 * n * (7.0 + 64 / 3.0)
    else:
        numbers = touched(2 * every * one.ids / 2) * (64 + one.state_row_bytes + 16 * one.state_element_bytes)
        moved, work = n * 8 + numbers, 2 * n * 7.0 + 2 * numbers / 5.0
    assert found.sync_bytes == pytest.approx(moved / every)
    assert found.sync_s == pytest.approx((moved / link + work) / every + 3000 / every)
    assert found.step_s == result.estimate.worst_s + found.sync_s
    replicated = grouped(replace(result, plan=plan_of("data_parallel", [0, 1])), layout, topology, every)
    rows = 1000 * (1 - math.exp(-one.ids / 1000))
    assert replicated.sync_bytes == pytest.approx(rows * (8 + 64))
