"""Ray Train on a Ray of this machine alone, which this process has started: fewer processes, and they start sooner.

By itself Ray Train starts a controller, which starts an account of what the cluster has, and then the workers: one
process after the other, seconds each. Here the controller runs in a thread of this process, nobody accounts for a
cluster that cannot grow, and the first workers start beside this process's own imports.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress
from typing import Any

from rayrec._runtime.debug import debugging
from rayrec.train.worker.start import load

_early: list[Any] = []


def import_workers() -> type:
    """Ray Train's class of a worker; its import takes a second."""
    from ray.train.v2._internal.execution.worker_group.worker import RayTrainWorker

    made: type = RayTrainWorker
    return made


def start_early(workers: int) -> None:
    """Start the workers of the first group on the local Ray, and let them import what a run needs."""
    import ray

    if ray.cluster_resources().get("GPU"):
        return  # a worker is given its GPU when it is made, and so far nobody knows whether GPUs are wanted
    # The group's placement group reserves for them.
    made: Any = ray.remote(num_cpus=0)(import_workers())
    _early.extend(made.remote() for _ in range(workers))
    for worker in _early:
        worker.execute.remote(load)


def forget_early() -> None:
    """They have ended with their Ray."""
    _early.clear()


def run_here(left: threading.Event, given: dict[str, Any]) -> Any:
    """Run Ray Train's controller in this thread, until the run ends.

    Args:
        left: set when nobody waits for that any more, and Ray is about to end.
        given: what Ray Train would hand to the controller's process.

    Returns:
        Ray Train's result of the run.
    """
    from ray.train.v2._internal.execution.controller import TrainController
    from ray.train.v2._internal.execution.scaling_policy import FixedScalingPolicy

    class Controller(TrainController):
        worker_group_cls = _group()

        async def _run_control_loop_iteration(self) -> None:
            if left.is_set():
                raise RuntimeError("the run has been left")
            await super()._run_control_loop_iteration()

    class Fixed(FixedScalingPolicy):
        def after_controller_start(self, train_run_context: Any) -> None: ...

        def _maybe_send_resource_request(self) -> None: ...

    if type(given["scaling_policy"]) is FixedScalingPolicy:
        given["scaling_policy"] = Fixed(given["scaling_policy"].scaling_config)

    async def run() -> Any:
        controller = Controller(**given)
        if not debugging():
            _quiet()
        await controller.run()
        return controller.get_result()

    return asyncio.run(run())


def _group() -> Any:
    import ray
    from ray.exceptions import RayActorError
    from ray.train.v2._internal.execution.worker_group import WorkerGroup
    from ray.train.v2._internal.execution.worker_group.worker import Worker

    class Group(WorkerGroup):
        @staticmethod
        def _get_worker_runtime_env(custom_runtime_env: Any) -> Any:
            return custom_runtime_env  # workers inherit variables from this process, whose Ray it is

        def _create_workers(
            self, num_workers: int, placement_group: Any, resources_per_worker: Any, *more: Any, **options: Any
        ) -> list[Any]:
            early, _early[:] = list(_early), []
            if len(early) == num_workers:
                with suppress(RayActorError):  # one has been killed
                    known = ray.get([worker.get_metadata.remote() for worker in early])
                    workers = [
                        Worker(actor, data, resources_per_worker, placement_group_bundle_index=index)
                        for index, (actor, data) in enumerate(zip(early, known, strict=True))
                    ]
                    return list(self._assign_worker_ranks(workers))
            for worker in early:
                ray.kill(worker)
            return list(super()._create_workers(num_workers, placement_group, resources_per_worker, *more, **options))

        def _init_train_context_on_workers(self, workers: list[Any], sync_actor: Any, arguments: Any) -> None:
            context = {
                "train_run_context": self._train_run_context,
                "synchronization_actor": sync_actor,
                "storage_context": self._storage_context,
                "worker_callbacks": self._worker_callbacks_to_propagate,
                "controller_actor": None,  # used only for what `ray.train.report` was given
            }
            begun = [
                worker.actor.init_train_context.remote(
                    distributed_context=worker.distributed_context,
                    **context,
                    **{name: values[index] for name, values in arguments.items()},
                )
                for index, worker in enumerate(workers)
            ]
            ray.get(begun)
            self._decorate_worker_log_file_paths(workers)

    return Group


def _quiet() -> None:
    """What the controller logs goes to its file alone, as if it were another process."""
    logger = logging.getLogger("ray.train")
    for handler in list(logger.handlers):
        if handler.name == "console":
            logger.removeHandler(handler)
