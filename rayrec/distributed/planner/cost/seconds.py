"""Seconds that one shard adds to its rank in one training step, by term.

The formulas count bytes and divide by bandwidths, after the roofline view of embedding bags in "Deep Learning
Recommendation Model" (Naumov et al. 2019, arXiv:1906.00091) and the all-to-all analysis in "Software-Hardware
Co-design for Fast and Scalable Training of DLRMs" (Mudigere et al. 2021, arXiv:2104.05158). They assume equally large
batches on all ranks. Ids are spread evenly over rows unless a table has counts (`tables/row_load.py`); with a UVM
cache, they follow Zipf's law.
"""

from __future__ import annotations

import math

from rayrec.distributed.comm.wire import ID_BYTES, LENGTH_BYTES, VECTOR_ELEMENT_BYTES, WEIGHT_BYTES
from rayrec.distributed.plan.shards import DEFAULT_LOAD_FACTOR, ShardingType
from rayrec.distributed.planner.cost.terms import Cost
from rayrec.distributed.planner.machine.devices import Device
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.tables.table import Table

ZIPF_EXPONENT = 0.75  # skew of cached ids, similar to Criteo's large tables
DENSE_MOMENTS = 2  # assume Adam for dense kernels; the planner does not know the optimizer
# Collectives per step: vectors and gradients of sharded tables; rows touched by replicas; ids (on GPUs also a header)
COLLECTIVES = {"sharded": 2, "replicated": 1}
ID_COLLECTIVES = {"cpu": 1, "cuda": 2}


def executor_of(sharding_type: str) -> str:
    """The kind of executor of a sharding type: "replicated", or "sharded" (pooled and sequences).

    The two additional exchanges inside a host that the pooled executor makes with two tiers are not counted;
    `shard_cost` includes the bytes that they save between hosts.
    """
    return "replicated" if sharding_type == ShardingType.DATA_PARALLEL.value else "sharded"


def fixed_seconds(executors: frozenset[str], topology: Topology) -> float:
    """Seconds per step that do not depend on the bytes moved: work and latency of collectives."""
    return work_seconds(executors, topology) + latency_seconds(executors, topology)


def latency_seconds(executors: frozenset[str], topology: Topology) -> float:
    """The latency of a step's collectives."""
    return topology.device.collective_s * _collectives(executors, topology)


def work_seconds(executors: frozenset[str], topology: Topology) -> float:
    """A rank's work per step that does not depend on the bytes moved; it needs a processor."""
    return topology.device.step_s + topology.device.begin_s * _collectives(executors, topology)


def _collectives(executors: frozenset[str], topology: Topology) -> int:
    """The number of collectives per step."""
    if topology.world_size == 1:
        return 0
    return ID_COLLECTIVES[topology.device.kind] + sum(COLLECTIVES[name] for name in executors)


def shared_seconds(table: Table, sharding_type: str, col_cuts: int, row_cuts: int, topology: Topology) -> float:
    """The seconds that a table costs every rank, wherever its shards are: routing ids, adding partial sums.

    ids of a rank * (route_s * column cuts, since each cut gets all ids [+ cut_s with row cuts]), and for each further
    row block partial_s per bag plus reading and adding one partial sum per vector. Data-parallel: nothing.
    """
    device, world = topology.device, topology.world_size
    if sharding_type == ShardingType.DATA_PARALLEL.value or world == 1:
        return 0.0
    ids, vectors = table.ids / world, (table.bags if table.pooled else 0.0) / world
    routed = ids * (device.route_s * col_cuts + (device.cut_s if row_cuts > 1 else 0.0))
    adding = device.partial_s + table.dim * VECTOR_ELEMENT_BYTES * 2 / device.memory_bw
    return routed + (row_cuts - 1) * vectors * adding


def distinct(ids: float, rows: float) -> float:
    """The expected number of distinct rows in `ids` uniform draws: rows * (1 - exp(-ids / rows))."""
    return -rows * math.expm1(-ids / rows) if rows > 0 else 0.0


def hit_rate(cache_load_factor: float) -> float:
    """The hit rate of a cache that holds the most used `cache_load_factor` of the rows.

    Under Zipf's law with exponent s < 1 the first x of the rows get x ** (1 - s) of the ids.
    """
    return min(1.0, cache_load_factor) ** (1.0 - ZIPF_EXPONENT)


def row_bandwidth(kernel: str, device: Device, cache_load_factor: float) -> float:
    """Bandwidth of the kernel's row reads and writes, in bytes per second.

    A cache miss moves the row over the bus and then into the cache.
    """
    if device.kind == "cpu" or kernel in ("fused", "dense"):
        return device.memory_bw
    if kernel == "fused_uvm":
        return device.host_to_device_bw
    miss = 1.0 - hit_rate(cache_load_factor)
    return 1.0 / (1.0 / device.memory_bw + miss * (1.0 / device.host_to_device_bw + 1.0 / device.memory_bw))


def shard_cost(
    table: Table,
    sharding_type: str,
    kernel: str,
    shape: tuple[int, int],
    local: int,
    topology: Topology,
    cache_load_factor: float = DEFAULT_LOAD_FACTOR,
    share: float | None = None,
) -> Cost:
    """The cost of a shard of `shape` (rows, columns) on a host with `local` ranks.

    With the `share` of the ids in its rows (rows / table rows by default), ids = table ids * share, and
    out = vectors * columns * 4 bytes:

    - lookup: ids * (id_s + max(row bytes, sector) / row bandwidth) + out / memory bandwidth
    - input: (ids * (8 [+ 4 weighted]) + bags * 4) over the links, in the shares of this host and of other hosts
    - output and gradient: vector elements over the links likewise, in the codec's bytes; every row block sends a
      partial sum per bag. With two tiers (hosts with equal numbers of ranks) the row blocks of a host are added first:
      elements * (local - 1) / local inside the host, and 1 / (row blocks of the host) between hosts
    - backward: reading `out` gradients, sorting ids (id_s each), and for each touched row row_s, and reading and
      writing it and its optimizer state
    - host: a constant per shard

    A data-parallel shard looks up its rank's ids only; ranks sort the rows they touched (sort_s each), all-gather them
    (4 bytes per element and 8 per row), sort those, add and apply them (bytes / replica_bw).
    """
    if shape[0] == 0 or shape[1] == 0:
        return Cost()
    if sharding_type == ShardingType.DATA_PARALLEL.value:
        return _replicated(table, kernel, shape, local, topology, cache_load_factor)
    device = topology.device
    share = shape[0] / table.rows if share is None else share
    ids = table.ids * share
    numbers = (table.bags if table.pooled else ids) * shape[1]
    out = numbers * VECTOR_ELEMENT_BYTES
    into = ids * (ID_BYTES + WEIGHT_BYTES * table.weighted) + table.bags * LENGTH_BYTES
    near, far = _links(local, topology)
    vector_near, vector_far = _vector_links(table, shape[0], local, topology)
    rows_bw = row_bandwidth(kernel, device, cache_load_factor)
    return Cost(
        lookup=_read(table, kernel, ids, shape[1], rows_bw, device) + out / device.memory_bw,
        input_intra=into * near,
        input_inter=into * far,
        output_intra=numbers * table.sent_bytes * vector_near,
        output_inter=numbers * table.sent_bytes * vector_far,
        backward=out / device.memory_bw + _update(table, kernel, ids, shape, rows_bw, device),
        gradient_intra=numbers * table.returned_bytes * vector_near,
        gradient_inter=numbers * table.returned_bytes * vector_far,
        host=device.table_s,
    )


def _replicated(
    table: Table, kernel: str, shape: tuple[int, int], local: int, topology: Topology, cache_load_factor: float
) -> Cost:
    device, world = topology.device, topology.world_size
    ids, vectors = table.ids / world, (table.bags if table.pooled else table.ids) / world
    out = vectors * shape[1] * VECTOR_ELEMENT_BYTES
    rows_bw = row_bandwidth(kernel, device, cache_load_factor)
    touched = distinct(ids, shape[0])
    gathered = touched * world * (shape[1] * VECTOR_ELEMENT_BYTES + ID_BYTES)
    near, far = _ring_links(local, topology)
    update = (ids + touched * world) * (device.sort_s + shape[1] * VECTOR_ELEMENT_BYTES / device.replica_bw)
    if kernel == "dense":
        update += _update(table, kernel, touched * world, shape, rows_bw, device)
    return Cost(
        lookup=_read(table, kernel, ids, shape[1], rows_bw, device) + out / device.memory_bw,
        backward=out / device.memory_bw + update,
        gradient_intra=gathered * near,
        gradient_inter=gathered * far,
        host=device.table_s,
    )


def _links(local: int, topology: Topology) -> tuple[float, float]:
    """Seconds per byte, inside the host and between hosts, of bytes that go to (or come from) all ranks evenly."""
    world, device = topology.world_size, topology.device
    return (local - 1) / world / device.intra_host_bw, (world - local) / world / device.inter_host_bw


def _ring_links(local: int, topology: Topology) -> tuple[float, float]:
    """The same for a ring all-gather: ranks forward all bytes but their own, one rank per host to the next."""
    world, device = topology.world_size, topology.device
    passed = (world - 1) / world
    if local == world:
        return passed / device.intra_host_bw, 0.0
    return passed * (local - 1) / local / device.intra_host_bw, passed / local / device.inter_host_bw


def _vector_links(table: Table, block_rows: int, local: int, topology: Topology) -> tuple[float, float]:
    """The same for pooled vectors; row blocks on one host are added there first."""
    near, far = _links(local, topology)
    blocks = min(local, -(-table.rows // block_rows))
    if blocks == 1 or not table.pooled or len(topology.hosts) == 1:
        return near, far
    if any(host.num_ranks != local for host in topology.hosts):
        return near, far
    return (local - 1) / local / topology.device.intra_host_bw, far / blocks


def _read(table: Table, kernel: str, ids: float, cols: int, rows_bw: float, device: Device) -> float:
    moved = max(cols * table.element_bytes, device.sector_bytes)
    return ids * (device.id_s + moved / rows_bw)


def _update(table: Table, kernel: str, ids: float, shape: tuple[int, int], rows_bw: float, device: Device) -> float:
    cols = shape[1]
    state = table.state_row_bytes + cols * table.state_element_bytes
    row = max(cols * table.element_bytes, device.sector_bytes) + state
    if kernel == "dense":  # the gradient is as large as the table; the optimizer reads and writes all of it
        passes = 2 + 2 * (1 + DENSE_MOMENTS)  # gradient zeroed and read; weights and moments read and written
        return ids * device.id_s + shape[0] * cols * table.element_bytes * passes / device.memory_bw
    return ids * device.id_s + distinct(ids, shape[0]) * (device.row_s + 2 * row / rows_bw)
