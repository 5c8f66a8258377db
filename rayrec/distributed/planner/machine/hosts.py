"""Hosts of a topology: ranks and memory of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """One machine: its first rank, number of ranks, and bytes of device and host memory per rank."""

    first_rank: int
    num_ranks: int
    memory_bytes: int
    host_bytes: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)


def ranks_per_host(world_size: int, local_world_size: int | None, hosts: Sequence[int] | None) -> list[int]:
    """The number of ranks of each host.

    Raises:
        ValueError: they do not add up to `world_size`.
    """
    if hosts is not None:
        if sum(hosts) != world_size or min(hosts) < 1:
            raise ValueError(f"hosts={list(hosts)} have {sum(hosts)} ranks, but world_size={world_size}")
        return list(hosts)
    local = world_size if local_world_size is None else local_world_size
    if local < 1:
        raise ValueError(f"local_world_size={local} must be at least 1")
    return [min(local, world_size - start) for start in range(0, world_size, local)]


def per_host(name: str, value: int | Sequence[int] | None, default: int, count: int) -> list[int]:
    """One number for each of `count` hosts.

    Raises:
        ValueError: another count, or a number that is not positive.
    """
    values = [default if value is None else value] * count if value is None or isinstance(value, int) else list(value)
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers for {count} hosts")
    return [int(positive(name, number)) for number in values]


def positive(name: str, value: float) -> float:
    """Returns `value`.

    Raises:
        ValueError: `value` is not positive.
    """
    if not value > 0:
        raise ValueError(f"{name}={value} must be positive")
    return value
