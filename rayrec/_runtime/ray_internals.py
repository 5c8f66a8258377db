"""Every private part of Ray that rayrec uses. `pyproject.toml` pins Ray to the release that is tested, and
`tests/train/test_ray_internals.py` fails with the name of the part that an upgrade has moved.

    LOCAL_SYSTEM        `ray.init(_system_config=…)`, until there are public settings for when freed objects are deleted
                        and for how soon a connection is tried again
    free_resources      `available_resources_per_node`, until ray-project/ray#60134 makes it public
    has_autoscaler      the status that an autoscaler writes for `ray status`, until Ray says whether nodes may come
    hide_data_progress  names of Ray Data's loggers, until a setting of `DataContext` hides all progress output
    draining_nodes      `GlobalState.get_draining_nodes`; `ray.train.get_preemption_info` waits for all workers
    torch_trainer       `TorchTrainer._initialize_and_run_controller`, until `RunConfig` takes a failure policy; and
                        `ElasticScalingPolicy._get_reserved_resources`, until Ray counts neither draining nodes nor
                        dead ones; and
                        `ControllerCallback`, until workers can be kept away from nodes between restarts; and
                        `DatasetsCallback`, `PlacementGroupCleanerCallback`, and `_send_resource_request` of
                        `FixedScalingPolicy`, until Ray Train starts their actors only for runs that use them
    run_controller      `TrainController` and its `WorkerGroup`, until Ray Train can run them in the driver; and
                        `auto_init_hook`, which starts another Ray when this one has ended; and
                        `SynchronizationActor` and `_shutdown_sync_actor`, until Ray Train starts the actor when needed
    kill_train_workers  `state.actors` and `CoreWorker.kill_actor`, until `ray.shutdown` ends calls of other threads
    without_helpers     `Node.start_…`, until `ray.init` can leave out the processes that a local Ray does not need
    with_limit          `FailurePolicy`, as above
    is_failed_start     `WorkerGroupStartupFailedError`, until it is a public exception
    request_name        `TorchTrainer.train_run_context`, and
    cancel_request      the actor `AutoscalingCoordinator`, until Ray drops the request of a dead driver at once
    request_room        the same actor; the public `request_resources` replaces the requests of all other runs

The file is here because `data`, `train` and `serve` all use it. Functions import Ray themselves, so that commands that
do not need Ray start without it.
"""

from __future__ import annotations

import json
import logging
import re
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

LOCAL_SYSTEM = {
    # Ray deletes freed objects once a second by default: for a fast stream that holds 250 MB more in memory.
    "free_objects_period_milliseconds": 200,
    # A process that connects before the raylet listens would try again after a second, 10 times.
    "raylet_client_connect_timeout_milliseconds": 20,
    "raylet_client_num_connect_attempts": 500,
}
# An API server without pages, the autoscaler, and the reader of logs, which nobody gets. Ray waits for the first one.
HELPERS = ("start_api_server", "start_monitor", "start_log_monitor")
DATA_LOGGERS = ("ray.data._internal.progress", "ray.data._internal.execution.streaming_executor")
COORDINATOR = "AutoscalingCoordinator"
TRAIN_WORKER = "RayTrainWorker"
AUTOSCALER_STATUS = b"__autoscaling_status"
_UNMANAGED_NODE = re.compile(r"node_[0-9a-f]{56}")  # node type of a node that no autoscaler started


@contextmanager
def without_helpers() -> Iterator[None]:
    """A Ray that starts in the body has none of the processes `HELPERS`: it starts in half the time."""
    from ray._private.node import Node

    def nothing(*_: Any, **__: Any) -> None:
        pass

    starts = {name: getattr(Node, name) for name in HELPERS}
    for name in starts:
        setattr(Node, name, nothing)
    try:
        yield
    finally:
        for name, start in starts.items():
            setattr(Node, name, start)


def free_resources() -> dict[str, dict[str, float]]:
    """The resources of each node that no task or actor has reserved, by node id."""
    from ray._private import state

    return state.available_resources_per_node()


def free_cpus(node_id: str) -> float:
    """CPUs of a node that no task or actor has reserved."""
    return float(free_resources().get(node_id, {}).get("CPU", 0.0))


def has_autoscaler() -> bool:
    """Whether an autoscaler may add nodes to the cluster. False also in the first seconds of a cluster."""
    from ray.experimental import internal_kv

    if (status := internal_kv._internal_kv_get(AUTOSCALER_STATUS)) is not None:
        report = json.loads(status).get("autoscaler_report") or {}
        node_types = list(report.get("active_nodes") or ())
    else:
        node_types = _node_types_of_v2()
    return any(name and not _UNMANAGED_NODE.fullmatch(name) for name in node_types)


def _node_types_of_v2() -> list[str]:
    """Node types according to Ray's second autoscaler, which keeps its status elsewhere; empty if it does not run."""
    import ray
    from ray.autoscaler.v2 import sdk

    try:
        status = sdk.get_cluster_status(ray.get_runtime_context().gcs_address)
    except Exception:  # no autoscaler has reported
        return []
    if status.stats.autoscaler_version != "2":
        return []
    return [node.ray_node_type_name for node in [*status.active_nodes, *status.idle_nodes]]


def hide_data_progress() -> None:
    """Keep Ray Data from printing a line for every dataset that is read."""
    for name in DATA_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)


def draining_nodes() -> frozenset[str]:
    """Ids of the nodes that Ray is about to remove; it schedules nothing new on them."""
    import ray._private.state

    return frozenset(ray._private.state.state.get_draining_nodes())


def torch_trainer(
    gives_up: Callable[[Exception | None], bool],
    *,
    abandoned: threading.Event | None,
    selector: Callable[[int], dict[str, str] | None],
    skipped: Callable[[Mapping[str, Mapping[str, float]]], frozenset[str]] | None = None,
    **arguments: Any,
) -> Any:
    """A `ray.train.torch.TorchTrainer` with a limit of rayrec's own on restarts, and without actors that it does not
    need: each imports Ray Train before the first step, 3 to 4 s of a core.

    Args:
        gives_up: see `with_limit`.
        abandoned: of a Ray that ends with this process and has no autoscaler, so that the controller runs in this
            thread: ends it when set. None: the controller is an actor; others free the workers' resources if it is
            killed, and request them from the autoscaler.
        selector: returns the label selector of a number of workers that are about to start; None: the run's own.
        skipped: from the resources that Ray reserves for an elastic run, by node, returns the nodes that do not count
            when it chooses its size. Ray also counts draining nodes, and waits for workers there until they are gone.
            An elastic run chooses its size by the nodes that are alive then; Ray's own count is up to 20 s old.
        arguments: of `TorchTrainer`.
    """
    from ray.train.torch import TorchTrainer

    base: Any = TorchTrainer

    class Trainer(base):
        def _initialize_and_run_controller(self, **controller: Any) -> Any:
            controller["failure_policy"] = with_limit(controller["failure_policy"], gives_up)
            controller["callbacks"] = [*_needed(controller["callbacks"], abandoned is not None), _selecting(selector)]
            if skipped is not None:
                reserve_now(controller["scaling_policy"], skipped)
            elif abandoned is not None:
                request_nothing(controller["scaling_policy"])
            if abandoned is not None:
                return run_controller(controller, abandoned)
            return super()._initialize_and_run_controller(**controller)

    return Trainer(**arguments)


def run_controller(arguments: dict[str, Any], abandoned: threading.Event) -> Any:
    """Run Ray Train's controller in this thread until the run ends.

    An actor would first import Ray Train and torch. Workers inherit the environment of this process, which has started
    Ray. If they had variables of their own, Ray would start two more processes for each.

    Args:
        arguments: of `TrainController`.
        abandoned: ends the controller when set, before its next look at the workers.

    Returns:
        Ray Train's result.
    """
    import asyncio

    import ray
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.worker_group import WorkerGroup, state, worker_group

    class Group(WorkerGroup):
        @staticmethod
        def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
            return {}

        def _init_train_context_on_workers(
            self, workers: list[Any], sync_actor: Any, train_context_args: dict[str, list[Any]]
        ) -> None:
            begun = [
                worker.actor.init_train_context.remote(
                    train_run_context=self._train_run_context,
                    distributed_context=worker.distributed_context,
                    synchronization_actor=sync_actor,
                    storage_context=self._storage_context,
                    worker_callbacks=self._worker_callbacks_to_propagate,
                    controller_actor=None,  # used only after `ray.train.report` with a checkpoint
                    **{name: values[index] for name, values in train_context_args.items()},
                )
                for index, worker in enumerate(workers)
            ]
            ray.get(begun)
            self._decorate_worker_log_file_paths(workers)

    class Controller(TrainController):
        worker_group_cls = Group

        async def _run_control_loop_iteration(self) -> None:
            if abandoned.is_set():
                raise RuntimeError("the run has been abandoned")
            await super()._run_control_loop_iteration()

    async def run() -> Any:
        controller = Controller(**arguments)
        await controller.run()
        return controller.get_result()

    with (
        _no_other_ray(),
        _replaced(worker_group, "SynchronizationActor", _Synchronization),
        _replaced(state, "_shutdown_sync_actor", _Synchronization.end),
    ):
        return asyncio.run(run())


class _Synchronization:
    """Replaces Ray Train's actor behind `ray.train.report` and `ray.train.collective`, and starts it at the first call.
    rayrec's workers use neither, and the actor's process would import Ray Train while workers start."""

    def __init__(self, name: str, arguments: dict[str, Any]) -> None:
        self._name, self._arguments = name, arguments

    @classmethod
    def options(cls, **_: Any) -> type[_Synchronization]:
        return cls

    @classmethod
    def remote(cls, **arguments: Any) -> _Synchronization:
        return cls(f"rayrec-synchronization-{uuid.uuid4().hex}", arguments)

    def __getattr__(self, method: str) -> Any:
        if method.startswith("_"):  # pickle looks for such
            raise AttributeError(method)
        from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor

        actor: Any = SynchronizationActor
        handle = actor.options(name=self._name, get_if_exists=True).remote(**self._arguments)
        return getattr(handle, method)

    def end(self) -> None:
        import ray

        with suppress(ValueError):  # never started
            ray.kill(ray.get_actor(self._name))


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, original)


def kill_train_workers() -> None:
    """Kill the workers of Ray Train on a local Ray, also those that are being started. Calls that wait for one end with
    an error."""
    import ray
    from ray._private import state, worker

    connection: Any = worker.global_worker
    for name, actor in state.actors().items():
        if actor["ActorClassName"] == TRAIN_WORKER and actor["State"] != "DEAD":
            connection.core_worker.kill_actor(ray.ActorID(bytes.fromhex(name)), True)


@contextmanager
def _no_other_ray() -> Iterator[None]:
    """Keep calls of Ray from starting one: Ray ends below the controller of a run that a second Ctrl-C abandons."""
    from ray._private import auto_init_hook

    with _replaced(auto_init_hook, "enable_auto_connect", False):
        yield


def _needed(callbacks: list[Any], local: bool) -> list[Any]:
    from ray.train.v2._internal.callbacks import DatasetsCallback
    from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
    from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback

    needs_actor = (PlacementGroupCleanerCallback, StateManagerCallback)  # that is, a controller that is one
    for callback in callbacks:
        if isinstance(callback, DatasetsCallback):
            # Workers open Ray Data themselves. The callback still hands them the driver's `DataContext`.
            datasets: Any = callback
            datasets.before_init_train_context = _no_shards
    return [callback for callback in callbacks if not (local and isinstance(callback, needs_actor))]


def _no_shards(workers: list[Any]) -> dict[str, list[Any]]:
    return {}


def _selecting(selector: Callable[[int], dict[str, str] | None]) -> Any:
    from ray.train.v2._internal.execution.callback import ControllerCallback

    class Selecting(ControllerCallback):
        def on_controller_start_worker_group(self, *, scaling_config: Any, num_workers: int) -> dict[str, str] | None:
            return selector(num_workers)

    return Selecting()


def with_limit(policy: Any, gives_up: Callable[[Exception | None], bool]) -> Any:
    """A failure policy that decides as `policy` does, unless `gives_up` returns True: then the run ends.

    Args:
        gives_up: called in Ray Train's controller at every failure, with what failed in the controller itself, or None
            where workers failed.
    """
    from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy

    class Limited(FailurePolicy):
        def __init__(self) -> None:
            super().__init__(policy.failure_config)

        def make_decision(self, training_failed_error: Any) -> Any:
            if gives_up(getattr(training_failed_error, "controller_failure", None)):
                return FailureDecision.RAISE
            return policy.make_decision(training_failed_error)

    return Limited()


def is_failed_start(error: Exception | None) -> bool:
    """Whether a worker group could not be started for another reason than missing resources."""
    from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError

    return isinstance(error, WorkerGroupStartupFailedError)


def reserve_now(policy: Any, skipped: Callable[[Mapping[str, Mapping[str, float]]], frozenset[str]]) -> None:
    """Let an elastic run choose its size by the nodes that are alive when it does, without those that `skipped`
    returns.

    Ray counts nodes every 20 s. Until then a run would wait for workers on a lost node, and restart without a new one.
    """
    import ray

    def reserved_now() -> dict[str, Any] | None:
        try:
            account = policy._autoscaling_coordinator
            reserved = ray.get(account.get_reserved_resources.remote(policy._requester_id, recompute=True), timeout=5)
        except Exception:  # no decision; Ray Train asks again
            return None
        left_out = skipped(reserved)
        return {node: resources for node, resources in reserved.items() if node not in left_out}

    policy._get_reserved_resources = reserved_now


def request_nothing(policy: Any) -> None:
    """Do not request workers of a fixed number from an autoscaler, and do not start the actor that does."""

    def nothing() -> None:
        pass

    policy._send_resource_request = policy._maybe_send_resource_request = policy._cancel_resource_request = nothing


def request_name(trainer: Any) -> str:
    """The name under which a trainer's workers are requested from Ray's autoscaler."""
    return f"train-{trainer.train_run_context.run_id}"


def cancel_request(name: str) -> None:
    """Withdraw a request for workers; Ray would hold the resources for a killed driver for three minutes.

    Raises:
        ValueError: no run has asked for elastic workers yet.
    """
    import ray

    coordinator = ray.get_actor(COORDINATOR, namespace=COORDINATOR)
    ray.get(coordinator.cancel_request.remote(name), timeout=5)


def request_room(
    name: str,
    bundles: Sequence[Mapping[str, float]],
    labels: Sequence[Mapping[str, str]],
    strategy: str,
    expire_s: float,
) -> None:
    """Request resources from the cluster's autoscaler, beside the requests of other runs; withdraw with
    `cancel_request`.

    Args:
        name: of the requester. A later request of the same name replaces this one and must have the same strategy.
        bundles: resources that are needed at the same time.
        labels: label selector of each bundle.
        strategy: placement strategy of the bundles.
        expire_s: seconds after which Ray drops the request.
    """
    import ray
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        ResourceRequestStrategy,
        get_or_create_autoscaling_coordinator,
    )

    coordinator: Any = get_or_create_autoscaling_coordinator()
    sent = coordinator.request_resources.remote(
        requester_id=name,
        resources=[dict(bundle) for bundle in bundles],
        label_selectors=[dict(selector) for selector in labels],
        strategy=ResourceRequestStrategy(strategy),
        expire_after_s=expire_s,
    )
    ray.get(sent, timeout=5)
