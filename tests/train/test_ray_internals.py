"""The private parts of Ray that `rayrec/_runtime/ray_internals.py` uses exist, and only that file uses any."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rayrec._runtime import ray_internals
from tests.train.pretended_ray import PretendedRay, pretended

__all__ = ["pretended"]

ROOT = Path(ray_internals.__file__).parents[1]
TRAIN = "ray.train.v2._internal"


def parameters(function: Any) -> set[str]:
    return set(inspect.signature(function).parameters)


@pytest.mark.parametrize(
    ("part", "takes"),
    [
        ("ray:init", None),
        ("ray._private.node:Node.start_api_server", {"include_dashboard", "raise_on_failure"}),
        ("ray._private.node:Node.start_monitor", {"self"}),
        ("ray._private.node:Node.start_log_monitor", {"self"}),
        ("ray._private.state:available_resources_per_node", set()),
        ("ray._private.state:GlobalState.get_draining_nodes", {"self"}),
        ("ray.data._internal.progress", None),
        ("ray.data._internal.execution.streaming_executor", None),
        ("ray.train.torch:TorchTrainer._initialize_and_run_controller", {"controller_init_kwargs"}),
        (
            f"{TRAIN}.execution.controller:TrainController",
            {"failure_policy", "scaling_policy", "train_run_context", "callbacks"},
        ),
        ("ray._private.auto_init_hook:enable_auto_connect", None),
        (f"{TRAIN}.execution.controller:TrainController.worker_group_cls", None),
        (f"{TRAIN}.execution.controller:TrainController._run_control_loop_iteration", {"self"}),
        (f"{TRAIN}.execution.controller:TrainController.run", {"self"}),
        (f"{TRAIN}.execution.controller:TrainController.get_result", {"self"}),
        (f"{TRAIN}.execution.worker_group:WorkerGroup._get_worker_runtime_env", {"custom_runtime_env"}),
        (
            f"{TRAIN}.execution.worker_group:WorkerGroup._init_train_context_on_workers",
            {"workers", "sync_actor", "train_context_args"},
        ),
        (f"{TRAIN}.execution.worker_group:WorkerGroup._decorate_worker_log_file_paths", {"workers"}),
        (
            f"{TRAIN}.execution.worker_group.worker:RayTrainWorker.init_train_context",
            {
                *("train_run_context", "distributed_context", "synchronization_actor", "storage_context"),
                *("worker_callbacks", "controller_actor"),
            },
        ),
        (f"{TRAIN}.execution.worker_group.worker_group:SynchronizationActor", None),
        (f"{TRAIN}.execution.worker_group.state:_shutdown_sync_actor", {"sync_actor"}),
        (f"{TRAIN}.execution.checkpoint.sync_actor:SynchronizationActor", None),
        (f"{TRAIN}.execution.worker_group.worker:{ray_internals.TRAIN_WORKER}", None),
        ("ray._private.state:actors", set()),
        ("ray._raylet:CoreWorker.kill_actor", None),
        (f"{TRAIN}.callbacks.state_manager:StateManagerCallback", None),
        (f"{TRAIN}.callbacks:DatasetsCallback.before_init_train_context", {"workers"}),
        (f"{TRAIN}.callbacks.placement_group_callback:PlacementGroupCleanerCallback", set()),
        (f"{TRAIN}.execution.failure_handling:FailurePolicy.make_decision", {"training_failed_error"}),
        (f"{TRAIN}.execution.failure_handling:FailureDecision.RAISE", None),
        (f"{TRAIN}.exceptions:WorkerGroupStartupFailedError", None),
        (f"{TRAIN}.execution.scaling_policy:ElasticScalingPolicy._get_reserved_resources", {"self"}),
        (f"{TRAIN}.execution.scaling_policy:ElasticScalingPolicy._autoscaling_coordinator", None),
        (f"{TRAIN}.execution.scaling_policy:FixedScalingPolicy._send_resource_request", {"self"}),
        (f"{TRAIN}.execution.scaling_policy:FixedScalingPolicy._maybe_send_resource_request", {"self"}),
        (
            f"{TRAIN}.execution.callback:ControllerCallback.on_controller_start_worker_group",
            {"scaling_config", "num_workers"},
        ),
        ("ray.train.v2._internal.execution.context:TrainRunContext.get_run_config", None),
        (
            "ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator:DefaultAutoscalingCoordinator",
            None,
        ),
    ],
)
def test_a_private_part_of_ray_is_where_it_was(part: str, takes: set[str] | None) -> None:
    module, _, path = part.partition(":")
    value: Any = importlib.import_module(module)
    for name in path.split(".") if path else ():
        value = getattr(value, name)
    assert takes is None or takes <= parameters(value)


def test_a_local_run_starts_no_actor_that_requests_its_workers() -> None:
    from ray.train import ScalingConfig
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    policy: Any = FixedScalingPolicy(ScalingConfig(num_workers=2))
    ray_internals.request_nothing(policy)
    policy.after_controller_start(SimpleNamespace(run_id="a"))
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2
    policy.before_controller_abort()
    assert "_autoscaling_coordinator" not in vars(policy._coordinator_client), "a property that starts the actor"


def test_an_elastic_run_is_as_large_as_the_nodes_that_are_alive_when_it_restarts(pretended: PretendedRay) -> None:
    """Ray's coordinator looks at the nodes every 20 s."""
    from ray.train import ScalingConfig
    from ray.train.v2._internal.execution.scaling_policy import ElasticScalingPolicy
    from ray.train.v2._internal.execution.scaling_policy.autoscaling_coordinator_client import (
        TrainAutoscalingCoordinatorClient,
    )

    policy: Any = ElasticScalingPolicy(ScalingConfig(num_workers=(1, 4), resources_per_worker={"CPU": 1.0}))

    def node(name: str, alive: bool = True) -> dict[str, Any]:
        return {"NodeID": name, "Resources": {"CPU": 1.0}, "Alive": alive}

    draining: set[str] = set()
    ray_internals.reserve_now(policy, lambda reserved: frozenset(draining & reserved.keys()))
    pretended.nodes = [node("a"), node("b")]
    client = TrainAutoscalingCoordinatorClient("train-run")
    vars(client)["_autoscaling_coordinator"] = pretended.coordinator()
    policy._requester_id, policy._coordinator_client = "train-run", client

    def workers() -> int:
        return int(policy.make_decision_for_non_running_worker_group().num_workers)

    assert workers() == 2
    pretended.nodes = [node("a"), node("b", alive=False)]
    assert workers() == 1
    pretended.nodes = [node("a"), node("c"), node("d")]
    assert workers() == 3
    draining.add("c")
    assert workers() == 2


def test_loggers_of_ray_data_have_these_names() -> None:
    for name in ray_internals.DATA_LOGGERS:
        assert importlib.import_module(name)


def test_no_other_file_uses_private_parts_of_ray() -> None:
    private = re.compile(
        r"\bray\.[\w.]*\._(?:private|internal)\b|from ray\._private|import ray\._|ray\.[\w.]+\.v2\._internal"
    )
    users = {path.name for path in ROOT.rglob("*.py") if private.search(path.read_text())}
    assert users == {"ray_internals.py"}
