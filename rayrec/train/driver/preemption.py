"""Nodes that Ray is about to take away, as a reclaimed spot instance: the run saves, and leaves them in time."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any


class Notices:
    """Decides when a run is to leave nodes: once in an attempt for each, as Ray places no later one there."""

    def __init__(self) -> None:
        self._left: set[tuple[int, str]] = set()

    def leave(self, attempt: int, nodes: Collection[str], draining: Collection[str]) -> str | None:
        """Why the workers are to start again elsewhere now, if they are.

        Args:
            attempt: the one that runs; `nodes`: that its workers are on.
            draining: that Ray is about to take away.
        """
        leaving = sorted(node for node in set(nodes) & set(draining) if (attempt, node) not in self._left)
        if not leaving:
            return None
        self._left |= {(attempt, node) for node in leaving}
        names = ", ".join(name[:8] for name in leaving)
        return f"Ray takes away {'node' if len(leaving) == 1 else 'nodes'} {names}"


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray is about to take away; it places no worker there any more."""
    import ray._private.state

    return frozenset(ray._private.state.state.get_draining_nodes())


def avoiding(policy: Any) -> None:
    """Let Ray's elastic policy start as many workers as there is room for outside of draining nodes, which its account
    of the cluster still has: it would wait for room there until they are gone."""
    count = policy._count_possible_workers

    def counted(reserved: dict[str, Any]) -> Any:
        draining = draining_nodes()
        return count({node: resources for node, resources in reserved.items() if node not in draining})

    policy._count_possible_workers = counted
