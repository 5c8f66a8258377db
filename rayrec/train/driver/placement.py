"""Counts the workers that fit on nodes, and keeps them away from nodes on which a GPU failed.

Ray Train's controller is a separate process that imports this file, so keep its imports few.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from rayrec._runtime.ray_internals import draining_nodes, free_resources
from rayrec.train.run.log import call_actor

NODE_ID = "ray.io/node-id"  # label that Ray gives to every node
# Ray learns from the nodes that the resources of ended workers are free.
FREED_WITHIN_S = 5.0


def fits_labels(selector: Mapping[str, str], labels: Mapping[str, str]) -> bool:
    """Whether a node with these labels satisfies a label selector as Ray does: each key has the value, `in(…)` one of
    the values, `!…` another one or none."""
    return all(_fits_label(condition, labels.get(key)) for key, condition in selector.items())


def _fits_label(condition: str, value: str | None) -> bool:
    negated, condition = condition.startswith("!"), condition.removeprefix("!")
    values = [item.strip() for item in condition[3:-1].split(",")] if condition.startswith("in(") else [condition]
    return (value in values) != negated


def room_for(
    per_worker: Mapping[str, float], nodes: Sequence[Mapping[str, float]], limit: int, strategy: str = "PACK"
) -> int:
    """Number of workers that fit on a cluster, at most `limit`.

    Args:
        per_worker: resources that a worker reserves.
        nodes: resources of each node.
        strategy: placement strategy: with `STRICT_PACK` all workers are on one node, with `STRICT_SPREAD` each has its
            own node.
    """
    counts = [min(int(node.get(name, 0.0) / n + 1e-6) for name, n in per_worker.items() if n) for node in nodes]
    if strategy == "STRICT_PACK":
        return min(limit, max(counts, default=0))
    return min(limit, sum(min(1, count) for count in counts) if strategy == "STRICT_SPREAD" else sum(counts))


class FailedNodes:
    """Leaves out nodes on which a GPU failed when Ray Train starts workers, while the other nodes have room.

    Args:
        mailbox: knows the nodes that failed.
        per_worker: resources that a worker reserves.
        labels: label selector of the run's workers.
        strategy: placement strategy of the workers.
        least: minimum number of workers.
    """

    def __init__(
        self, mailbox: Any, per_worker: Mapping[str, float], labels: Mapping[str, str], strategy: str, least: int
    ) -> None:
        self._mailbox, self._least = mailbox, least
        self._per_worker, self._labels, self._strategy = dict(per_worker), dict(labels), strategy

    def selector(self, num_workers: int) -> dict[str, str] | None:
        """The label selector for `num_workers` workers; None if no node is left out.

        Tells the driver if the other nodes have no room, so that failed ones are used again.
        """
        failed = self.known()
        if not failed or NODE_ID in self._labels:
            return None
        deadline = time.monotonic() + FREED_WITHIN_S
        while self._free_room(failed, num_workers) < num_workers:
            if time.monotonic() > deadline:
                self._report(f"{num_workers} workers have no room on the other nodes")
                return None
            time.sleep(0.25)
        return {**self._labels, NODE_ID: f"!in({', '.join(sorted(failed))})"}

    def skipped(self, reserved: Mapping[str, Mapping[str, float]]) -> frozenset[str]:
        """The nodes that do not count when an elastic run chooses its size: those that drain, and those that failed if
        the others have room for the minimum number of workers.

        Args:
            reserved: resources that Ray reserves for the run, by node id.
        """
        draining = draining_nodes()
        both = draining | self.known()
        others = [resources for node, resources in reserved.items() if node not in both]
        has_room = room_for(self._per_worker, others, self._least, self._strategy) >= self._least
        return both if has_room else draining

    def known(self) -> frozenset[str]:
        """Ids of the nodes on which a GPU failed; empty if the mailbox does not answer."""
        from ray.exceptions import RayError

        try:
            return frozenset(call_actor(self._mailbox.failed_nodes))
        except RayError:
            return frozenset()

    def _free_room(self, failed: frozenset[str], limit: int) -> int:
        import ray

        free, unusable = free_resources(), failed | draining_nodes()
        usable = [
            free.get(node["NodeID"], {})
            for node in ray.nodes()
            if node["Alive"] and node["NodeID"] not in unusable and fits_labels(self._labels, node.get("Labels") or {})
        ]
        return room_for(self._per_worker, usable, limit, self._strategy)

    def _report(self, reason: str) -> None:
        message = f"{reason}: the nodes on which a GPU failed are used again"
        self._mailbox.put.remote({"kind": "event", "event": "failed_node_used", "message": message})
