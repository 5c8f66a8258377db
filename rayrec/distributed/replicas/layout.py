"""Assigns ranks to sharding groups, and finds the replicas of a rank."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """Sharding groups of equal size.

    Args:
        world_size: number of ranks of all groups.
        group_size: number of ranks of one group.
        strided: whether replicas are consecutive, and the ranks of a group are R apart, where R is the number of
            groups: with hosts of R ranks, groups span hosts and synchronization stays inside a host. Else the ranks of
            a group are consecutive: groups stay inside hosts, and synchronization spans hosts.

    Raises:
        ValueError: the world does not divide into groups.
    """

    world_size: int
    group_size: int
    strided: bool = False

    def __post_init__(self) -> None:
        _check(self.world_size, self.group_size, f"sharding groups of {self.group_size}", "group sizes")

    @classmethod
    def of_replicas(cls, world_size: int, replicas: int) -> GroupLayout:
        """`replicas` groups of consecutive ranks.

        Raises:
            ValueError: the world does not divide into that many groups.
        """
        _check(world_size, replicas, f"{replicas} replicas of a sharding group", "numbers of replicas")
        return cls(world_size, world_size // replicas)

    @property
    def replicas(self) -> int:
        """Number of groups."""
        return self.world_size // self.group_size

    def group_of(self, rank: int) -> range:
        """The ranks of the group of `rank`, in the order of their shards."""
        if self.strided:
            return range(rank % self.replicas, self.world_size, self.replicas)
        start = rank - rank % self.group_size
        return range(start, start + self.group_size)

    def replicas_of(self, rank: int) -> range:
        """The ranks with the same shards as `rank`, one per group."""
        if self.strided:
            start = rank - rank % self.replicas
            return range(start, start + self.replicas)
        return range(rank % self.group_size, self.world_size, self.group_size)


def _check(world_size: int, divisor: int, groups: str, divisors: str) -> None:
    if not 1 <= divisor <= world_size or world_size % divisor:
        fit = ", ".join(str(count) for count in range(1, world_size + 1) if world_size % count == 0)
        raise ValueError(f"{world_size} ranks cannot be divided into {groups}; possible {divisors}: {fit}")
