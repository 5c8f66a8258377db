"""Every term of the cost and storage of a shard, by hand on round numbers."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from rayrec.distributed.planner import Topology
from rayrec.distributed.planner.cost.memory import shard_storage
from rayrec.distributed.planner.cost.seconds import row_bandwidth, shard_cost, shared_seconds
from rayrec.distributed.planner.machine.devices import DEVICES
from rayrec.distributed.planner.search.options import options
from rayrec.distributed.planner.tables.table import Table

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
    gpu = DEVICES["h100"]
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


def test_a_host_takes_as_many_column_parts_as_it_has_ranks() -> None:
    wide = replace(TABLE, dim=64)
    parts = {kind: set() for kind in wide.kernels}
    for option in options(0, wide, TOPOLOGY, off_device=False):
        parts[option.sharding_type].add(len(option.units))
    assert parts == {"column_wise": {2, 3, 4}, "table_column_wise": {2}}
