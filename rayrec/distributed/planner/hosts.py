"""What a topology is made of: hosts, the memory of each rank, the speed of links."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Host:
    """One machine: its first rank, how many ranks it has, and the bytes that each of them may use."""

    first_rank: int
    num_ranks: int
    memory_bytes: int
    host_bytes: int

    @property
    def ranks(self) -> range:
        return range(self.first_rank, self.first_rank + self.num_ranks)


class CustomTopologyData:
    """Memory of each rank, where ranks have unlike memory.

    Args:
        data: `hbm_cap` or `ddr_cap`, bytes for each rank.
        world_size: ranks.

    Raises:
        ValueError: another field, or not one number a rank.
    """

    supported_fields = ("ddr_cap", "hbm_cap", "ssd_cap")

    def __init__(self, data: Mapping[str, Sequence[int]], world_size: int) -> None:
        for name, values in data.items():
            if name not in self.supported_fields:
                raise ValueError(f"custom topology data: {name!r} is none of {', '.join(self.supported_fields)}")
            if len(values) != world_size:
                raise ValueError(f"custom topology data: {name} has {len(values)} numbers for {world_size} ranks")
        self._data = {name: list(values) for name, values in data.items()}

    def has_data(self, key: str) -> bool:
        return key in self._data

    def get_data(self, key: str) -> list[int]:
        """Bytes for each rank."""
        return self._data[key]

    def by_host(self, key: str, sizes: Sequence[int]) -> list[int] | None:
        """Bytes of the smallest rank of each host; None where nothing is said."""
        if key not in self._data:
            return None
        starts = [sum(sizes[:place]) for place in range(len(sizes))]
        return [min(self._data[key][start : start + size]) for start, size in zip(starts, sizes, strict=True)]


@dataclass(frozen=True, slots=True)
class BasicCommsBandwidths:
    """Bytes per millisecond between ranks of different hosts, and of one."""

    inter_host_bw: float
    intra_host_bw: float


def host_sizes(world_size: int, local_world_size: int | None, hosts: Sequence[int] | None) -> list[int]:
    """Ranks of each host.

    Raises:
        ValueError: they do not add up.
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
        ValueError: others are given, or one is not positive.
    """
    values = [default if value is None else value] * count if value is None or isinstance(value, int) else list(value)
    if len(values) != count:
        raise ValueError(f"{name} has {len(values)} numbers for {count} hosts")
    return [int(positive(name, each)) for each in values]


def positive(name: str, value: float) -> float:
    """The value.

    Raises:
        ValueError: it is not positive.
    """
    if not value > 0:
        raise ValueError(f"{name}={value} must be positive")
    return value
