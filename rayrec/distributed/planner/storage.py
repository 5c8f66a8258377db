"""Bytes that one shard takes on its rank, and bytes a rank keeps back for all else."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from rayrec.distributed.planner.cost import (
    DENSE_MOMENTS,
    ID_BYTES,
    LENGTH_BYTES,
    VECTOR_ELEMENT_BYTES,
    WEIGHT_BYTES,
    distinct,
)
from rayrec.distributed.planner.topology import Topology
from rayrec.distributed.planner.types import Storage, Table
from rayrec.distributed.types import DEFAULT_LOAD_FACTOR, ShardingType

ID_COPIES = 2  # the pipeline exchanges the next batch's ids while this batch's are in use
GATHER_COPIES = 6
VECTOR_COPIES = 2  # the vectors sent, and their gradients coming back
RESERVE_SHARE = 0.1  # of a rank's memory: allocator fragments, library contexts, communication buffers


def shard_storage(
    table: Table,
    sharding_type: str,
    kernel: str,
    shape: tuple[int, int],
    topology: Topology,
    cache_load_factor: float = DEFAULT_LOAD_FACTOR,
) -> Storage:
    """The bytes of a shard of `shape` (rows, columns).

    - weights: rows * columns * element size; optimizer: the state of those rows, two moments under the dense kernel
    - gradients: the dense kernel only, as large as the weights
    - ids: what arrives of ids (8 [+ 4 weighted]) and lengths (8), twice for the pipeline
    - vectors: what leaves and its gradients; row cuts also receive everyone's partial sums for their own examples
    - replicas: the rows that all ranks touched, with gradients, as they are sent, arrive, are joined and added up
    - UVM: weights and state lie in host memory; the cached kernel keeps `cache_load_factor` of them on the device
    """
    rows, cols = shape
    if rows == 0 or cols == 0:
        return Storage()
    share = 1 / topology.world_size if sharding_type == ShardingType.DATA_PARALLEL.value else rows / table.rows
    bags = table.bags * (share if sharding_type == ShardingType.DATA_PARALLEL.value else 1.0)
    ids = table.ids * share
    vectors = (bags if table.pooled else ids) * cols * VECTOR_ELEMENT_BYTES
    weights = float(rows * cols * table.element_bytes)
    optimizer = float(rows * (table.state_row_bytes + cols * table.state_element_bytes))
    if kernel == "dense":
        optimizer = DENSE_MOMENTS * weights
    arriving = (ids * (ID_BYTES + WEIGHT_BYTES * table.weighted) + bags * LENGTH_BYTES) * ID_COPIES
    leaving = vectors * (VECTOR_COPIES + (rows < table.rows))
    if sharding_type == ShardingType.DATA_PARALLEL.value and topology.world_size > 1:
        touched = distinct(ids, rows) * topology.world_size
        arriving += GATHER_COPIES * touched * (cols * VECTOR_ELEMENT_BYTES + ID_BYTES)
    off = topology.compute_device == "cuda" and kernel in ("fused_uvm", "fused_uvm_caching")
    cached = (weights + optimizer) * min(1.0, cache_load_factor) if off and kernel == "fused_uvm_caching" else 0.0
    return Storage(
        weights=0.0 if off else weights,
        optimizer=0.0 if off else optimizer,
        gradients=weights if kernel == "dense" else 0.0,
        ids=arriving,
        vectors=leaving,
        cache=cached,
        host=weights + optimizer if off else 0.0,
    )


def reserve_bytes(tables: Sequence[Table], dense_bytes: int, memory_bytes: int, world_size: int) -> float:
    """What a rank keeps back: the dense part, its own batch (ids twice, every table's vectors and gradients), a share.

    Args:
        tables: all tables.
        dense_bytes: parameters, gradients, optimizer state and buckets of the rest of the model.
        memory_bytes: the rank's memory.
        world_size: ranks that share the step's ids.
    """
    batch = sum(
        ID_COPIES * (t.ids * (ID_BYTES + WEIGHT_BYTES * t.weighted) + t.bags * LENGTH_BYTES)
        + VECTOR_COPIES * (t.bags if t.pooled else t.ids) * t.dim * VECTOR_ELEMENT_BYTES
        for t in tables
    )
    return dense_bytes + batch / world_size + RESERVE_SHARE * memory_bytes


def reserves(tables: Sequence[Table], topology: Topology, dense_bytes: int) -> NDArray[np.float64]:
    """`reserve_bytes` of every rank of `topology`."""
    memory = [host.memory_bytes for host in topology.hosts for _ in host.ranks]
    held = {each: reserve_bytes(tables, dense_bytes, each, topology.world_size) for each in set(memory)}
    return np.array([held[each] for each in memory])
