"""Bytes that one shard takes on its rank, and bytes that a rank reserves for everything else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayrec.distributed.comm.wire import ID_BYTES, LENGTH_BYTES, VECTOR_ELEMENT_BYTES, WEIGHT_BYTES
from rayrec.distributed.plan.shards import DEFAULT_LOAD_FACTOR, ShardingType
from rayrec.distributed.planner.cost.seconds import DENSE_MOMENTS, distinct
from rayrec.distributed.planner.cost.terms import ShardBytes
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.tables.table import Table
from rayrec.modules.init import BLOCK_ELEMENTS

# Peak copies during a step, as the executors allocate them.
ID_COPIES = 6  # on the looking-up rank: message, joined, in lookup order; three when backward sorts rows
SOURCE_ID_COPIES = 4  # on the batch's rank: batch, cut by rows, in rank order, message
BAG_BYTES = 16  # per bag on the looking-up rank: length as received and in order, offset
VECTOR_COPIES = 2  # on the looking-up rank: vectors sent, gradients received
SOURCE_VECTOR_COPIES = 4  # on the batch's rank: received, result, gradient, message back
PARTIAL_COPIES = 2  # received and message back hold one part per row block
INDEX_BYTES = 1.5  # three indices (8 bytes each) per 16 elements of a result, for the order of columns
# rows exchanged by replicas: received, joined, summed, averaged; weights: old, scaled gradient, step, new
GATHER_COPIES = 8
FILL_BYTES = 4 * BLOCK_ELEMENTS  # initial weights of shards without whole rows are made in blocks
# Of a rank's memory: allocator fragments, library contexts, communication buffers, and with replicas that are averaged,
# three float32 copies of a block of rows (192 MiB, `replicas.averaging.average`).
RESERVE_SHARE = 0.1


def shard_storage(
    table: Table,
    sharding_type: str,
    kernel: str,
    shape: tuple[int, int],
    topology: Topology,
    cache_load_factor: float = DEFAULT_LOAD_FACTOR,
) -> ShardBytes:
    """The bytes of a shard of `shape` (rows, columns).

    - weights: rows * columns * element size; optimizer: the state of those rows, two moments with the dense kernel
    - gradients: the dense kernel only, as large as the weights
    - ids: `ID_COPIES` of the received ids (8 bytes [+ 4 weighted]), and `BAG_BYTES` per bag
    - vectors: `VECTOR_COPIES` of the sent vectors; for row blocks also `PARTIAL_COPIES` of the partial sums of the
      rank's examples, vectors / ranks * (blocks - 1), with their indices
    - data-parallel: the rank's ids only; `GATHER_COPIES` of the rows that all ranks touched, with gradients
    - UVM: weights and state are in host memory; the cached kernel keeps `cache_load_factor` of them on the device
    """
    rows, cols = shape
    if rows == 0 or cols == 0:
        return ShardBytes()
    share = 1 / topology.world_size if sharding_type == ShardingType.DATA_PARALLEL.value else rows / table.rows
    bags = table.bags * (share if sharding_type == ShardingType.DATA_PARALLEL.value else 1.0)
    ids = table.ids * share
    vectors = (bags if table.pooled else ids) * cols * VECTOR_ELEMENT_BYTES
    weights = float(rows * cols * table.element_bytes)
    optimizer = float(rows * (table.state_row_bytes + cols * table.state_element_bytes))
    if kernel == "dense":
        optimizer = DENSE_MOMENTS * weights
    arriving = ids * (ID_BYTES + WEIGHT_BYTES * table.weighted) * ID_COPIES + bags * BAG_BYTES
    leaving = vectors * VECTOR_COPIES
    if sharding_type == ShardingType.DATA_PARALLEL.value and topology.world_size > 1:
        touched = distinct(ids, rows) * topology.world_size
        arriving += GATHER_COPIES * touched * (cols * VECTOR_ELEMENT_BYTES + ID_BYTES)
    elif table.pooled:
        blocks = min(table.rows / rows, topology.world_size)
        partial_sums = table.bags / topology.world_size * cols * (blocks - 1)
        leaving += partial_sums * (PARTIAL_COPIES * VECTOR_ELEMENT_BYTES + INDEX_BYTES)
    off = topology.compute_device == "cuda" and kernel in ("fused_uvm", "fused_uvm_caching")
    cached = (weights + optimizer) * min(1.0, cache_load_factor) if off and kernel == "fused_uvm_caching" else 0.0
    return ShardBytes(
        weights=0.0 if off else weights,
        optimizer=0.0 if off else optimizer,
        gradients=weights if kernel == "dense" else 0.0,
        ids=arriving,
        vectors=leaving,
        cache=cached,
        host=weights + optimizer if off else 0.0,
    )


def reserve_bytes(tables: Sequence[Table], dense_bytes: int, memory_bytes: int, world_size: int) -> float:
    """The bytes that a rank reserves: the dense part, its batch, and a share for everything else.

    The batch: `SOURCE_ID_COPIES` of its ids with lengths, `SOURCE_VECTOR_COPIES` of every table's vectors with their
    indices, and one block of initial weights.

    Args:
        tables: all tables.
        dense_bytes: parameters, gradients, optimizer state and buckets of the rest of the model.
        memory_bytes: the rank's memory.
        world_size: ranks that share the step's ids.
    """
    number_bytes = SOURCE_VECTOR_COPIES * VECTOR_ELEMENT_BYTES + INDEX_BYTES
    batch = sum(
        SOURCE_ID_COPIES * (t.ids * (ID_BYTES + WEIGHT_BYTES * t.weighted) + t.bags * LENGTH_BYTES)
        + (t.bags if t.pooled else t.ids) * t.dim * number_bytes
        for t in tables
    )
    return dense_bytes + batch / world_size + FILL_BYTES + RESERVE_SHARE * memory_bytes


def reserves(tables: Sequence[Table], topology: Topology, dense_bytes: int) -> NDArray[np.float64]:
    """`reserve_bytes` of every rank of `topology`."""
    memory = [host.memory_bytes for host in topology.hosts for _ in host.ranks]
    reserve_of = {
        num_bytes: reserve_bytes(tables, dense_bytes, num_bytes, topology.world_size) for num_bytes in set(memory)
    }
    return np.array([reserve_of[num_bytes] for num_bytes in memory])
