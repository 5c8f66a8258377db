"""The hosts of the ranks."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from rayrec.distributed.comm.objects import all_gather_object
from rayrec.distributed.comm.rank_context import RankContext


@dataclass(frozen=True, slots=True)
class Hosts:
    """Hosts with an equal number of ranks each. Ranks of a host are consecutive.

    Args:
        world_size: Number of ranks.
        size: Number of ranks per host.
    """

    world_size: int
    size: int

    @property
    def ranks(self) -> list[range]:
        """The ranks of each host."""
        return [range(first, first + self.size) for first in range(0, self.world_size, self.size)]

    @property
    def peers(self) -> list[range]:
        """For each local rank, the ranks with this local rank, one per host."""
        return [range(local_rank, self.world_size, self.size) for local_rank in range(self.size)]


def find_hosts(context: RankContext) -> Hosts | None:
    """The hosts of all ranks, or None if there is one host, if each has one rank, or if their sizes differ.

    Collective. Ranks with a known `local_world_size` report it; the others report their hostname.
    """
    reports = all_gather_object(context.local_world_size or socket.gethostname(), context.group)
    size = ranks_per_host(reports)
    return None if size is None or size in (1, len(reports)) else Hosts(len(reports), size)


def ranks_per_host(reports: Sequence[int | str]) -> int | None:
    """Number of ranks per host, from each rank's report of this number or of its hostname; None if hosts differ."""
    first = reports[0]
    if isinstance(first, int):
        return first if set(reports) == {first} and len(reports) % first == 0 else None
    runs = [(name, len(list(run))) for name, run in groupby(reports)]
    scattered = len({name for name, _ in runs}) < len(runs)
    sizes = {size for _, size in runs}
    return None if scattered or len(sizes) > 1 else sizes.pop()
