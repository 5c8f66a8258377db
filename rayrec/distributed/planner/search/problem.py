"""The planning problem: tables in canonical order, their options, and the room on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rayrec.distributed.planner.machine.topology import Topology
from rayrec.distributed.planner.search.options import Option, host_sizes, options
from rayrec.distributed.planner.tables.table import Table

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ROUNDING_BYTES = 64  # margin for rounding errors of float sums of bytes


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Tables sorted by name, so that the caller's order does not change the plan, and the room on every rank.

    Args:
        options: options of each table.
        class_R: index of each rank's host size in `host_sizes(topology)`.
        host_R: host number of each rank.
        room_R, host_room_R: device and host bytes available for shards.
        reserve_R: reserved device bytes.
        allowed_TR: allowed ranks of each table; None if all tables may use all ranks.
    """

    tables: tuple[Table, ...]
    topology: Topology
    options: tuple[tuple[Option, ...], ...]
    class_R: Ints
    host_R: Ints
    room_R: Floats
    host_room_R: Floats
    reserve_R: Floats
    allowed_TR: Bools | None

    @property
    def world_size(self) -> int:
        return self.topology.world_size


def make_problem(tables: Sequence[Table], topology: Topology, reserve_R: Floats, off_device: bool) -> Problem:
    """The problem of placing `tables` on `topology`, with `reserve_R` bytes reserved per rank.

    Args:
        off_device: allow tables in host memory.
    """
    ordered = tuple(sorted(tables, key=lambda table: table.key))
    sizes = host_sizes(topology)
    classes, hosts, memory, host_memory = [], [], [], []
    for number, host in enumerate(topology.hosts):
        classes += [sizes.index(host.num_ranks)] * host.num_ranks
        hosts += [number] * host.num_ranks
        memory += [host.memory_bytes] * host.num_ranks
        host_memory += [host.host_bytes] * host.num_ranks
    return Problem(
        tables=ordered,
        topology=topology,
        options=tuple(tuple(options(i, table, topology, off_device)) for i, table in enumerate(ordered)),
        class_R=np.array(classes, dtype=np.int64),
        host_R=np.array(hosts, dtype=np.int64),
        room_R=np.maximum(0.0, np.array(memory, dtype=np.float64) - reserve_R - ROUNDING_BYTES),
        host_room_R=np.array(host_memory, dtype=np.float64),
        reserve_R=reserve_R,
        allowed_TR=_allowed(ordered, topology.world_size),
    )


def _allowed(tables: Sequence[Table], world_size: int) -> Bools | None:
    if all(len(table.ranks) == world_size for table in tables):
        return None
    allowed = np.zeros((len(tables), world_size), dtype=np.bool_)
    for row, table in zip(allowed, tables, strict=True):
        row[list(table.ranks)] = True
    return allowed
