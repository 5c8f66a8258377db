"""A Ray that runs nothing: actors are objects of this process, answers are there at once, nodes are those that a test
names. What a driver asks of Ray can so be seen without one."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import ray
import ray._private.state
import ray.autoscaler.v2.sdk
import ray.experimental.internal_kv
import ray.util.metrics
from ray.data._internal.cluster_autoscaler import default_autoscaling_coordinator as coordination


class Actor:
    """`actor.method.remote(…)` calls the object's method, and the answer is what it returns."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def __getattr__(self, name: str) -> Any:
        return SimpleNamespace(remote=getattr(self.target, name))


@dataclass
class PretendedRay:
    """What was asked of Ray.

    Args:
        resources: of the whole cluster.
        free: what is not taken; None: all.
        up: whether a Ray is connected already.
        refuses: what `ray.init` raises.
        actors: that were made, each with the options it was made with.
        named: actors that are found by name.
        gauges: name, or table/name → (value, run).
        looks: how often the nodes were asked for, the draining ones too.
        draining: node → when it is taken away.
        requested: bundles that Ray's coordinator asked the autoscaler for, at each change.
        autoscaler: what an autoscaler has written for `ray status`; None: there is none.
        hangups_blocked: whether SIGHUP was blocked at each `ray.init`, as it then is for what that starts.
    """

    resources: dict[str, float] = field(default_factory=lambda: {"CPU": 4.0})
    free: dict[str, float] | None = None
    up: bool = True
    refuses: Exception | None = None
    nodes: list[dict[str, Any]] = field(default_factory=list)
    begun: list[dict[str, Any]] = field(default_factory=list)
    shut_down: int = 0
    actors: list[tuple[Actor, dict[str, Any]]] = field(default_factory=list)
    killed: list[Actor] = field(default_factory=list)
    named: dict[tuple[str, str], Actor] = field(default_factory=dict)
    gauges: dict[str, tuple[float, str]] = field(default_factory=dict)
    looks: int = 0
    draining: dict[str, int] = field(default_factory=dict)
    requested: list[Any] = field(default_factory=list)
    autoscaler: bytes | None = None
    hangups_blocked: list[bool] = field(default_factory=list)

    def init(self, **given: Any) -> None:
        self.begun.append(given)
        self.hangups_blocked.append(signal.SIGHUP in signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        if self.refuses is not None:
            raise self.refuses

    def shutdown(self) -> None:
        self.shut_down += 1

    def remote(self, **given: Any) -> Callable[[type], Any]:
        def options(made: type, **more: Any) -> Any:
            def make(*arguments: Any) -> Actor:
                actor = Actor(made(*arguments))
                self.actors.append((actor, {**given, **more}))
                return actor

            return SimpleNamespace(remote=make)

        return lambda made: SimpleNamespace(options=lambda **more: options(made, **more))

    def all_nodes(self) -> list[dict[str, Any]]:
        self.looks += 1
        whole = {"NodeID": "0" * 56, "Resources": self.resources, "Alive": True}
        return self.nodes if self.nodes else [whole]

    def free_by_node(self) -> dict[str, dict[str, float]]:
        """If only the sum is named: as it is, on each node."""
        nodes = {node["NodeID"]: node.get("Resources", {}) for node in self.nodes} or {"0" * 56: self.resources}
        return {node: resources if self.free is None else self.free for node, resources in nodes.items()}

    def coordinator(self) -> Actor:
        """Ray's own coordinator, without its process."""
        name = ("AutoscalingCoordinator", "AutoscalingCoordinator")
        if name not in self.named:

            def request(bundles: list[Any], label_selectors: list[Any] | None = None) -> None:
                self.requested.append(bundles)

            up, self.up = self.up, False  # or it starts a thread
            self.named[name] = Actor(
                coordination._AutoscalingCoordinatorActor(
                    send_resources_request=request, get_cluster_nodes=self.all_nodes
                )
            )
            self.up = up
        return self.named[name]

    def draining_nodes(self) -> dict[str, int]:
        self.looks += 1
        return self.draining

    def refuse_status(self, address: str) -> Any:
        raise RuntimeError("no autoscaler has reported")

    def get_actor(self, name: str, namespace: str) -> Actor:
        if (name, namespace) not in self.named:
            raise ValueError(name)
        return self.named[name, namespace]


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> PretendedRay:
    found = PretendedRay()

    class Gauge:
        def __init__(self, name: str, description: str, tag_keys: tuple[str, ...]) -> None:
            assert description and tag_keys == (("run", "table") if name.startswith("rayrec_ids_") else ("run",))
            self.name = name

        def set_default_tags(self, tags: dict[str, str]) -> None:
            self.run = tags["run"]

        def set(self, value: float, tags: dict[str, str] | None = None) -> None:
            found.gauges["/".join([*(tags or {}).values(), self.name])] = (value, self.run)

    here = SimpleNamespace(get_node_id=lambda: "0" * 56, gcs_address="")
    state = ray._private.state
    for place, name, pretends in (
        (ray, "is_initialized", lambda: found.up),
        (ray, "init", found.init),
        (ray, "shutdown", found.shutdown),
        (ray, "get", lambda answer, timeout: answer),
        (ray, "kill", found.killed.append),
        (ray, "remote", found.remote),
        (ray, "nodes", found.all_nodes),
        (ray, "get_actor", found.get_actor),
        (ray, "get_runtime_context", lambda: here),
        (ray, "cluster_resources", lambda: found.resources),
        (ray, "available_resources", lambda: found.resources if found.free is None else found.free),
        (ray.util.metrics, "Gauge", Gauge),
        (state.state, "get_draining_nodes", found.draining_nodes),
        (state, "available_resources_per_node", found.free_by_node),
        (ray.experimental.internal_kv, "_internal_kv_get", lambda key: found.autoscaler),
        (ray.autoscaler.v2.sdk, "get_cluster_status", found.refuse_status),
        (coordination, "get_or_create_autoscaling_coordinator", found.coordinator),
    ):
        monkeypatch.setattr(place, name, pretends)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    return found


def set_seconds(monkeypatch: pytest.MonkeyPatch, module: ModuleType, **seconds: float) -> None:
    """Sets waits of a module, which are longer than a test may take."""
    for name, value in seconds.items():
        monkeypatch.setattr(module, name, value)
