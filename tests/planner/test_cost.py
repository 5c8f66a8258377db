"""What a plan costs: every term of a shard by hand on round numbers, and what ranks of a host cost each other."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from jobs.experiments.step_time import slowdown, step_on
from rayrec.distributed import FP16, Codec, EmbeddingBagCollectionSharder, int8_rows
from rayrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology, plan_tables
from rayrec.distributed.planner.cost.estimate import Estimate
from rayrec.distributed.planner.cost.memory import shard_storage
from rayrec.distributed.planner.cost.seconds import row_bandwidth, shard_cost, shared_seconds
from rayrec.distributed.planner.cost.terms import Cost, ShardBytes
from rayrec.distributed.planner.tables.table import Table
from tests.planner.problems import SHARDER, collection, table

# two hosts of two ranks; 1,000 rows of 8 numbers, 400 ids in 200 bags of all ranks together
TOPOLOGY = Topology(4, "cpu", local_world_size=2)
CPU = TOPOLOGY.device
TABLE = Table(
    path="",
    name="t",
    rows=1000,
    dim=8,
    element_bytes=4,
    num_features=1,
    ids=400.0,
    bags=200.0,
    pooled=True,
    weighted=False,
    state_row_bytes=4,
    state_element_bytes=0,
    kernels={"column_wise": ("fused",), "table_column_wise": ("fused",)},
    runnable={},
    ranks=(0, 1, 2, 3),
    min_partition=4,
)
NEAR, FAR = 1 / 4 / CPU.intra_host_bw, 2 / 4 / CPU.inter_host_bw  # of 4 ranks one more is on the host, two are not


def touched(ids: float, rows: float) -> float:
    return rows * (1 - math.exp(-ids / rows))


def test_a_whole_table() -> None:
    cost = shard_cost(TABLE, "table_wise", "fused", (1000, 8), 2, TOPOLOGY)
    vectors = 200 * 8 * 4
    row = max(8 * 4, CPU.sector_bytes)
    assert cost.lookup == pytest.approx(400 * (CPU.id_s + row / CPU.memory_bw) + vectors / CPU.memory_bw)
    assert cost.input_intra == pytest.approx((400 * 8 + 200 * 4) * NEAR)
    assert cost.input_inter == pytest.approx((400 * 8 + 200 * 4) * FAR)
    assert (cost.output_intra, cost.gradient_intra) == pytest.approx((vectors * NEAR,) * 2)
    assert (cost.output_inter, cost.gradient_inter) == pytest.approx((vectors * FAR,) * 2)
    update = 400 * CPU.id_s + touched(400, 1000) * (CPU.row_s + 2 * (row + 4) / CPU.memory_bw)
    assert cost.backward == pytest.approx(vectors / CPU.memory_bw + update)
    assert cost.host == CPU.table_s
    assert shared_seconds(TABLE, "table_wise", 1, 1, TOPOLOGY) == pytest.approx(100 * CPU.route_s)


def test_rows_are_read_as_fast_as_where_they_lie() -> None:
    gpu = Topology(1, gpu="h100").device
    assert row_bandwidth("fused", gpu, 0.5) == row_bandwidth("dense", gpu, 0.5) == gpu.memory_bw
    assert row_bandwidth("fused_uvm", gpu, 0.5) == gpu.host_to_device_bw
    # Of a cache of 1/16 of the rows every second lookup is a miss: over the bus, then into the cache.
    behind_a_cache = 1 / (1 / gpu.memory_bw + 0.5 * (1 / gpu.host_to_device_bw + 1 / gpu.memory_bw))
    assert row_bandwidth("fused_uvm_caching", gpu, 1 / 16) == pytest.approx(behind_a_cache)
    assert row_bandwidth("fused_uvm_caching", gpu, 2.0) == gpu.memory_bw
    for kernel in ("fused", "fused_uvm", "fused_uvm_caching"):
        assert row_bandwidth(kernel, CPU, 0.5) == CPU.memory_bw


def test_weights_travel_with_their_ids() -> None:
    cost = shard_cost(replace(TABLE, weighted=True), "table_wise", "fused", (1000, 8), 2, TOPOLOGY)
    assert cost.input_intra == pytest.approx((400 * 12 + 200 * 4) * NEAR)


def test_row_blocks_send_a_partial_sum_for_every_bag() -> None:
    cost = shard_cost(TABLE, "row_wise", "fused", (250, 8), 2, TOPOLOGY)
    assert cost.input_intra == pytest.approx((100 * 8 + 200 * 4) * NEAR)  # a quarter of the ids, every bag's length
    vectors = 200 * 8 * 4
    assert cost.output_intra == pytest.approx(vectors * (1 / 2) / CPU.intra_host_bw)  # two blocks meet on their host
    assert cost.output_inter == pytest.approx(vectors * FAR / 2)
    adding = 50 * (CPU.partial_s + 8 * 4 * 2 / CPU.memory_bw)
    routed = 100 * (CPU.route_s + CPU.cut_s)
    assert shared_seconds(TABLE, "row_wise", 1, 4, TOPOLOGY) == pytest.approx(routed + 3 * adding)


def test_replicas_gather_each_others_rows() -> None:
    cost = shard_cost(TABLE, "data_parallel", "fused", (1000, 8), 2, TOPOLOGY)
    rows = touched(100, 1000)
    gathered = rows * 4 * (8 * 4 + 8)
    passed = gathered * 3 / 4  # round the ranks; of a host's two, one hands it to the other host
    links = (passed / 2 / CPU.intra_host_bw, passed / 2 / CPU.inter_host_bw)
    assert (cost.gradient_intra, cost.gradient_inter) == pytest.approx(links)
    update = (100 + rows * 4) * (CPU.sort_s + 8 * 4 / CPU.replica_bw)
    assert cost.backward == pytest.approx(50 * 8 * 4 / CPU.memory_bw + update)
    assert cost.input_intra == cost.output_intra == 0


def test_bytes_of_a_shard() -> None:
    held = shard_storage(TABLE, "table_wise", "fused", (1000, 8), TOPOLOGY)
    assert (held.weights, held.optimizer, held.gradients) == (1000 * 8 * 4, 1000 * 4, 0)
    assert held.ids == 400 * 8 * 6 + 200 * 16
    assert held.vectors == 200 * 8 * 4 * 2
    rows = shard_storage(TABLE, "row_wise", "fused", (250, 8), TOPOLOGY)
    assert rows.weights == 250 * 8 * 4
    assert rows.ids == 100 * 8 * 6 + 200 * 16  # a quarter of the ids, every bag
    assert rows.vectors == 200 * 8 * 4 * 2 + 50 * 8 * 3 * (2 * 4 + 1.5)
    dense = shard_storage(TABLE, "table_wise", "dense", (1000, 8), TOPOLOGY)
    assert (dense.optimizer, dense.gradients) == (2 * 1000 * 8 * 4, 1000 * 8 * 4)
    replica = shard_storage(TABLE, "data_parallel", "fused", (1000, 8), TOPOLOGY)
    gathered = 8 * touched(100, 1000) * 4 * (8 * 4 + 8)
    assert replica.ids == pytest.approx(100 * 8 * 6 + 50 * 16 + gathered)
    assert replica.vectors == 50 * 8 * 4 * 2


def test_a_shard_of_nothing_costs_and_holds_nothing() -> None:
    for shape in ((0, 8), (1000, 0)):
        assert set(shard_cost(TABLE, "row_wise", "fused", shape, 2, TOPOLOGY)) == {0.0}
        assert set(shard_storage(TABLE, "row_wise", "fused", shape, TOPOLOGY)) == {0.0}


def test_bytes_of_a_shard_in_host_memory() -> None:
    gpus = Topology(4, "cuda", local_world_size=2)
    weights, state = 1000 * 8 * 4, 1000 * 4
    uvm = shard_storage(TABLE, "table_wise", "fused_uvm", (1000, 8), gpus)
    assert (uvm.weights, uvm.optimizer, uvm.cache, uvm.host) == (0, 0, 0, weights + state)
    cached = shard_storage(TABLE, "table_wise", "fused_uvm_caching", (1000, 8), gpus, 0.25)
    assert (cached.weights, cached.cache, cached.host) == (0, (weights + state) / 4, weights + state)


def test_only_pooled_row_blocks_hold_partial_sums() -> None:
    for pooled, kind, rows in [(True, "table_wise", 1000), (False, "row_wise", 250)]:
        facts = replace(TABLE, pooled=pooled)
        vectors = (200 if pooled else 400 * rows / 1000) * 8 * 4
        assert shard_storage(facts, kind, "fused", (rows, 8), TOPOLOGY).vectors == 2 * vectors


def test_a_dense_replica_updates_what_all_ranks_touched() -> None:
    """Rows meet and are added up as for a fused one; then the gradient is as large as the table."""
    topology = Topology(4, "cpu", hosts=[2, 2])
    one, device = replace(TABLE, dim=16), topology.device
    fused, dense = (shard_cost(one, "data_parallel", kernel, (1000, 16), 2, topology) for kernel in ("fused", "dense"))
    met = 4 * 1000 * (1 - math.exp(-one.ids / 4 / 1000))
    added = met * device.id_s + 1000 * 16 * one.element_bytes * 8 / device.memory_bw
    assert dense.backward == pytest.approx(fused.backward + added)
    assert (dense.lookup, dense.gradient_inter, dense.host) == (fused.lookup, fused.gradient_inter, fused.host)


def test_row_blocks_of_one_host_meet_before_they_leave_it():
    alike, unlike = Topology.from_world("2x4", "h100"), Topology(8, hosts=[5, 3], gpu="h100")
    (planned,) = plan_tables([table("a", 1000, 64)], alike, sharder=SHARDER).tables
    whole = shard_cost(planned, "table_wise", "fused", (1000, 64), 4, alike)
    block = shard_cost(planned, "table_row_wise", "fused", (250, 64), 4, alike)
    assert (block.output_inter, block.gradient_inter) == pytest.approx((whole.output_inter / 4,) * 2)
    assert block.output_intra > whole.output_intra  # all of it meets, also what is for other hosts
    flat = shard_cost(planned, "table_row_wise", "fused", (200, 64), 5, unlike)
    assert flat.output_inter == shard_cost(planned, "table_wise", "fused", (1000, 64), 5, unlike).output_inter


def test_a_dense_kernel_costs_its_gradient_two_moments_and_a_pass_over_all_rows():
    tables, told = [table("a", 1_000_000)], {"a": ParameterConstraints(compute_kernels=["dense"])}
    dense = plan_tables(tables, Topology(1, "cpu"), told, sharder=SHARDER).estimate
    fused = plan_tables(tables, Topology(1, "cpu"), sharder=SHARDER).estimate
    terms = dict(zip(ShardBytes._fields, dense.storage_RT[0] - fused.storage_RT[0], strict=True))
    weights, row_state = 1_000_000 * 64 * 4, 1_000_000 * 4
    assert terms == {
        "weights": 0, "optimizer": 2 * weights - row_state, "gradients": weights, "ids": 0, "vectors": 0, "cache": 0,
        "host": 0,
    }  # fmt: skip
    assert dense.worst_s > 10 * fused.worst_s


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


def test_the_number_formats_of_a_sharder_are_counted() -> None:
    def costs(codec: Codec | None) -> Cost:
        topology, sharder = Topology(4, "cpu"), EmbeddingBagCollectionSharder(codec=codec)
        planner = EmbeddingShardingPlanner(topology, batch_size=64)
        (found,) = planner.result(collection([table("t", 10, 12)]), [sharder]).tables
        return shard_cost(found, "table_wise", "fused", (10, 12), 2, topology)

    whole, less = costs(None), costs(Codec(int8_rows(), FP16))
    assert less.output_intra == pytest.approx(whole.output_intra * (32 + 8) / 32 / 4)
    assert less.output_inter == pytest.approx(whole.output_inter * (32 + 8) / 32 / 4)
    assert less.gradient_inter == pytest.approx(whole.gradient_inter / 2)
    assert (less.lookup, less.backward, less.input_inter) == (whole.lookup, whole.backward, whole.input_inter)
