"""Planning for replicated sharding groups: the machine of one, what synchronisation costs, how many are best."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from rayrec.distributed.planner import NoPlanError, ParameterConstraints, PlanResult, Topology
from rayrec.distributed.planner.planner import plan_tables
from rayrec.distributed.planner.sharding_groups import choose_groups, group_topology, grouped
from rayrec.distributed.replicas import GroupLayout
from rayrec.modules import EmbeddingBagConfig

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
