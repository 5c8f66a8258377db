"""Checks a loaded or edited plan: every table covered once, known ranks and kernels, enough memory."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.plan.shards import EmbeddingComputeKernel, ParameterSharding
from rayrec.distributed.planner.cost.estimate import Estimate, evaluate
from rayrec.distributed.planner.cost.memory import reserves
from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.report.result import NoPlanError
from rayrec.distributed.planner.report.text import human_bytes
from rayrec.distributed.planner.tables.table import Table


def check_plan(
    plan: ShardingPlan,
    tables: Sequence[Table],
    topology: Topology,
    dense_bytes: int = 0,
) -> Estimate:
    """Checks a plan for `tables` on `topology` and returns its estimate.

    Raises:
        ValueError: a table that is missing, unknown, or not covered exactly once; an unknown rank, sharding type or
            kernel.
        NoPlanError: a rank with too little memory.
    """
    for table in tables:
        sharding = plan.plan.get(table.path, {}).get(table.name)
        if sharding is None:
            raise ValueError(f"plan lacks table {table.label!r}")
        _check_kernel(table, sharding, topology)
        _check_cover(table, sharding, topology)
    reserve_R = reserves(tables, topology, dense_bytes)
    estimate = evaluate(plan, tables, topology, reserve_R)
    _check_memory(estimate, topology)
    return estimate


def _check_kernel(table: Table, sharding: ParameterSharding, topology: Topology) -> None:
    if sharding.sharding_type not in table.runnable:
        raise ValueError(
            f"table {table.label!r}: sharding type {sharding.sharding_type!r} cannot run on "
            f"{topology.compute_device}; allowed: {', '.join(table.runnable)}"
        )
    kernels = table.runnable[sharding.sharding_type]
    try:
        kernel = EmbeddingComputeKernel(sharding.compute_kernel).value
    except ValueError:
        kernel = ""
    if kernel not in kernels:
        raise ValueError(
            f"table {table.label!r}: compute kernel {sharding.compute_kernel!r} cannot run with "
            f"{sharding.sharding_type} on {topology.compute_device}; allowed: {', '.join(kernels)}"
        )


def _check_cover(table: Table, sharding: ParameterSharding, topology: Topology) -> None:
    label = f"table {table.label!r}"
    edges = np.array([(s.rows.start, s.rows.stop, s.cols.start, s.cols.stop, s.rank) for s in sharding.shards])
    if not len(edges):
        raise ValueError(f"{label}: the plan gives it no shards")
    for shard in sharding.shards:
        if not 0 <= shard.rank < topology.world_size:
            raise ValueError(f"{label}: {shard.rank} is not a rank of 0 .. {topology.world_size - 1}")
        outside = shard.rows.stop > table.rows or shard.cols.stop > table.dim
        if shard.rows.start < 0 or shard.cols.start < 0 or outside:
            raise ValueError(
                f"{label}: shard rows {shard.rows}, columns {shard.cols} is outside its {table.rows} x {table.dim}"
            )
    if sharding.replicated:
        _check_replicas(table, edges, topology)
        return
    overlap = _overlap(edges)
    if overlap is not None:
        first, second = (sharding.shards[i] for i in overlap)
        raise ValueError(
            f"{label}: two shards overlap: rows {first.rows}, columns {first.cols} on rank {first.rank} and "
            f"rows {second.rows}, columns {second.cols} on rank {second.rank}"
        )
    covered = int(((edges[:, 1] - edges[:, 0]) * (edges[:, 3] - edges[:, 2])).sum())
    if covered != table.rows * table.dim:
        missing = table.rows * table.dim - covered
        raise ValueError(f"{label}: its shards leave {missing} of {table.rows * table.dim} numbers on no rank")


def _check_replicas(table: Table, edges: np.ndarray[tuple[int, int], np.dtype[np.int64]], topology: Topology) -> None:
    complete = (edges[:, :4] == (0, table.rows, 0, table.dim)).all()
    if not complete or sorted(edges[:, 4].tolist()) != list(range(topology.world_size)):
        raise ValueError(
            f"table {table.label!r}: a data_parallel table needs one whole copy on each of the "
            f"{topology.world_size} ranks"
        )


def _overlap(edges: np.ndarray[tuple[int, int], np.dtype[np.int64]]) -> tuple[int, int] | None:
    """The first two rectangles that overlap."""
    full = (edges[:, 1] > edges[:, 0]) & (edges[:, 3] > edges[:, 2])
    for i in range(len(edges) - 1):
        a, rest = edges[i], edges[i + 1 :]
        hit = (rest[:, 0] < a[1]) & (a[0] < rest[:, 1]) & (rest[:, 2] < a[3]) & (a[2] < rest[:, 3])
        hit &= full[i + 1 :] & full[i]
        if hit.any():
            return i, i + 1 + int(hit.argmax())
    return None


def _check_memory(estimate: Estimate, topology: Topology) -> None:
    for host in topology.hosts:
        for rank in host.ranks:
            need, available = float(estimate.device_bytes_R[rank]), host.memory_bytes
            if need > available:
                raise NoPlanError(
                    f"rank {rank} needs {human_bytes(need)} under this plan and has {human_bytes(available)}; "
                    f"move {human_bytes(need - available)} of its shards to other ranks"
                )
            host_bytes = float(estimate.host_bytes_R[rank])
            if host_bytes > host.host_bytes:
                raise NoPlanError(
                    f"rank {rank} needs {human_bytes(host_bytes)} of host memory under this plan and has "
                    f"{human_bytes(host.host_bytes)}"
                )
