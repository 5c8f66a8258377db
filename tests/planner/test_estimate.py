"""What ranks that share a host cost each other, and what a step holds beside weights."""

from __future__ import annotations

import numpy as np
import pytest

from rayrec.distributed.planner import Topology, plan_tables
from rayrec.distributed.planner.estimate import Estimate, slowdown
from rayrec.distributed.planner.storage import shard_storage
from rayrec.distributed.planner.types import Cost, ParameterConstraints, ShardBytes
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
    assert estimate(lookups).step_on(processors, alone) == pytest.approx(seconds)


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
