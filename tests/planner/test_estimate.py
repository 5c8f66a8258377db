"""What ranks that share a host cost each other, and what a step holds beside weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jobs.experiments.step_time import slowdown, step_on
from rayrec.distributed.planner import ParameterConstraints, Topology, plan_tables
from rayrec.distributed.planner.cost.estimate import Estimate
from rayrec.distributed.planner.cost.memory import shard_storage
from rayrec.distributed.planner.cost.terms import Cost, ShardBytes
from tests.planner.problems import SHARDER, table


def estimate(lookup_R: list[float]) -> Estimate:
    return Estimate(
        cost_RT=np.array([Cost(lookup=seconds) for seconds in lookup_R]),
        storage_RT=np.zeros((len(lookup_R), len(ShardBytes._fields))),
        collectives_s=0.0,
        routing_s=0.0,
        reserve_R=np.zeros(len(lookup_R)),
    )


@pytest.mark.parametrize(
    ("lookups", "processors", "alone", "seconds"),
    [
        ([3, 1, 2, 0], 4, 1.0, 3),  # each has a processor: the busiest rank
        ([3, 1, 2, 0], 1, 1.0, 6),  # one processor: the sum
        ([3, 3, 3, 3], 2, 1.0, 6),
        ([3, 1], 2, 0.5, 1 + 2 * 0.5),  # one second both, then one rank by itself, twice as fast
        ([3, 1], 1, 0.5, 4),  # they never run at the same time, and were measured so
    ],
)
def test_ranks_slow_each_other_while_they_work(lookups, processors: int, alone: float, seconds: float):
    assert step_on(estimate(lookups), processors, alone) == pytest.approx(seconds)


def test_a_step_waits_for_the_slowest_rank_of_every_exchange():
    costs = [
        Cost(input_intra=1, output_inter=2, gradient_intra=4, lookup=8, backward=16),
        Cost(input_inter=3, output_intra=1, gradient_inter=1, lookup=10, host=5),
    ]
    both = replace(estimate([0, 0]), cost_RT=np.array(costs), collectives_s=0.5, routing_s=0.25)
    assert step_on(both, 2) == pytest.approx(0.5 + 3 + 2 + 4 + 10 + 16.25)
    assert both.fixed_s == 0.75
    assert both.seconds_R.tolist() == [31 + 0.75, 20 + 0.75]
    assert (both.worst_s, both.worst_rank) == (31.75, 0)
    assert both.lookup_ratio == pytest.approx(10 / 9)
    assert estimate([0, 0]).lookup_ratio == 1


@pytest.mark.parametrize(
    ("kind", "ranks", "collectives"), [("table_wise", 4, 3), ("data_parallel", 4, 2), ("table_wise", 1, 0)]
)
def test_a_rank_needs_a_processor_for_its_own_work_and_none_for_a_collective(kind: str, ranks: int, collectives: int):
    """Of a step only latency stays what it was where two processors are shared; ids cost nothing here."""
    plain = Topology(ranks, "cpu")
    nothing = {"id_s": 0.0, "row_s": 0.0, "route_s": 0.0, "sort_s": 0.0, "table_s": 0.0}
    speeds = {"memory_bw": 1e30, "intra_host_bw": 1e30, "replica_bw": 1e30, "alone": 1.0}
    fixed = {"step_s": 0.5, "begin_s": 0.25, "collective_s": 8.0}
    topology = plain.with_device(replace(plain.device, **nothing, **speeds, **fixed))
    told = {"t": ParameterConstraints(sharding_types=[kind])}
    found = plan_tables([table("t", 100, 8)], topology, told, batch_size=4, sharder=SHARDER).estimate
    own = 0.5 + 0.25 * collectives
    assert found.routing_s == pytest.approx(own) and found.collectives_s == pytest.approx(8.0 * collectives)
    assert step_on(found, ranks) == pytest.approx(own + 8.0 * collectives)
    assert step_on(found, 2) == pytest.approx(max(1, ranks / 2) * own + 8.0 * collectives)


def test_all_ranks_at_once_is_what_was_measured():
    assert slowdown(4, 4, 4, 0.7) == pytest.approx(1.0)
    assert slowdown(1, 4, 4, 0.7) == pytest.approx(0.7)
    assert slowdown(4, 4, 2, 0.7) == pytest.approx(2.0)


def test_row_blocks_add_buffers_for_their_parts_but_a_tiny_last_one_does_not_explode():
    topology = Topology(4, "cpu")
    told = {"t": ParameterConstraints(pooling_factors=[1])}
    (facts,) = plan_tables([table("t", 1000, 64)], topology, told, batch_size=32, sharder=SHARDER).tables

    def vectors(rows: int) -> float:
        return shard_storage(facts, "row_wise", "fused", (rows, 64), topology).vectors

    sent_and_gradients = 2 * facts.bags * 64 * 4
    whole = shard_storage(facts, "table_wise", "fused", (1000, 64), topology).vectors
    assert whole == sent_and_gradients < vectors(250)
    assert vectors(1) <= sent_and_gradients + 2 * facts.bags * 64 * (2 * 4 + 1.5)
