"""The planning problem in a canonical order: tables by name, their options, and what every rank has. A fact."""

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

ROUNDING_BYTES = 64  # sums of byte counts are floats; this keeps their rounding inside the memory


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Tables, sorted by name so that the caller's order cannot change the answer, and the room on every rank.

    Args:
        options: of each table.
        class_R: for each rank, the position of its host's size in `host_sizes(topology)`.
        room_R, host_room_R: bytes that shards may take on the device and beside it.
        reserve_R: bytes kept back on the device.
        allowed_TR: which table may lie on which rank; None where every table may lie anywhere.
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
    """The problem of placing `tables` on `topology` with `reserve_R` bytes kept back on every rank.

    Args:
        off_device: whether tables may be kept in host memory.
    """
    ordered = tuple(sorted(tables, key=lambda table: table.key))
    sizes = host_sizes(topology)
    classes, hosts, memory, beside = [], [], [], []
    for number, host in enumerate(topology.hosts):
        classes += [sizes.index(host.num_ranks)] * host.num_ranks
        hosts += [number] * host.num_ranks
        memory += [host.memory_bytes] * host.num_ranks
        beside += [host.host_bytes] * host.num_ranks
    return Problem(
        tables=ordered,
        topology=topology,
        options=tuple(tuple(options(i, table, topology, off_device)) for i, table in enumerate(ordered)),
        class_R=np.array(classes, dtype=np.int64),
        host_R=np.array(hosts, dtype=np.int64),
        room_R=np.maximum(0.0, np.array(memory, dtype=np.float64) - reserve_R - ROUNDING_BYTES),
        host_room_R=np.array(beside, dtype=np.float64),
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
