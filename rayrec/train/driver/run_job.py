"""Runs a job to its end, in this process or in Ray Train workers."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rayrec._runtime.ray_internals import kill_train_workers, request_name
from rayrec._runtime.threads import call_every
from rayrec.checkpoint.ownership import stop_requested
from rayrec.data.stream.shared_manifest import shared
from rayrec.storage.folder import open_folder
from rayrec.storage.parallel import actor_here
from rayrec.train.driver.cluster import Cluster, connected, nodes_without, refuse_unseen, unshared_folder
from rayrec.train.driver.console import Display
from rayrec.train.driver.early_ray import default_env
from rayrec.train.driver.elastic import note_request, release_request, resizing, without_read_reservations
from rayrec.train.driver.evaluations import Evaluations, evaluating
from rayrec.train.driver.failures import failure_reason, line_of
from rayrec.train.driver.resources import Demand, capacity, demand_of, one_worker_per_gpu
from rayrec.train.driver.room import await_resources, waiting_for_room
from rayrec.train.driver.signals import StopSignals, handling, run_in_background
from rayrec.train.driver.trackers import ExportedMetrics
from rayrec.train.errors import Interrupted, TrainError, describe
from rayrec.train.run.log import Mailbox, Record, RunState, call_actor, handling_records

if TYPE_CHECKING:
    from rayrec.train.worker.session import Job


STOP_CHECK_S = 3.0
RecordHandler = Callable[[Record], object]


def run_job(
    job: Job, state: RunState, handle: RecordHandler, display: Display, previous_attempts: int
) -> dict[str, Any]:
    """Run a job to its end and return the outcome that its rank 0 reported.

    Args:
        state: updated by `handle` with each record.
        handle: called with each record, from a thread.
        previous_attempts: number of attempts of earlier launches.

    Raises:
        TrainError: the job failed; names the cause. `ResourceError` if Ray has too few resources, `Interrupted` if a
            signal stopped it.
    """
    if job.config.trainer.num_workers == 0:
        signals = _run_alone(job, state, handle, display, previous_attempts)
    else:
        with connected(job.config.trainer.elastic) as cluster:
            signals = _run_on_ray(job, state, handle, display, previous_attempts, cluster)
    if state.stopped is not None:
        raise signals.interrupted(state.stopped)
    if state.fatal is not None:
        raise TrainError(state.fatal)
    if state.done is None:
        raise TrainError(
            f"Workers exited at step {state.step} without returning a result. See /tmp/ray/session_latest/logs."
        )
    outcome: dict[str, Any] = state.done["outcome"]
    return outcome


def _stop_signals(job: Job, request_stop: Callable[[], object], display: Display) -> StopSignals:
    grace_s = job.config.trainer.grace_s

    def stop() -> None:
        try:
            request_stop()
        finally:
            text = f"Stopping: saving a final checkpoint (up to {grace_s:g} s). Press Ctrl-C again to exit now."
            display.say(text, style="yellow")

    return StopSignals(stop, grace_s)


@contextmanager
def _stop_requests(job: Job, signals: StopSignals) -> Iterator[None]:
    """While the body runs, look for a request of `rayrec stop`, which may come from another machine."""
    launch = job.launch
    if launch is None:
        yield
        return
    root = open_folder(job.checkpoints)

    def check() -> None:
        if stop_requested(root, launch):
            signals.request()

    with call_every(check, STOP_CHECK_S, "rayrec-stop-requests"):
        yield


def _run_alone(
    job: Job, state: RunState, handle: RecordHandler, display: Display, previous_attempts: int
) -> StopSignals:
    """Run a job in this process; returns the stop signals that it received."""
    import torch

    from rayrec.train.worker.entry import work_alone

    if job.task == "fit" and job.config.trainer.use_gpu is not False and torch.cuda.is_available():
        text = "trainer.num_workers=0 trains on the CPU. Set trainer.num_workers=1 to use this machine's GPU."
        display.say(text, style="yellow")
    mailbox = Mailbox(previous_attempts)
    signals = _stop_signals(job, mailbox.request_stop, display)
    try:
        with (
            handling(signals),
            _stop_requests(job, signals),
            handling_records(mailbox.take, handle, display.tolerance),
        ):
            run_in_background(lambda: work_alone(job, mailbox), signals)
    except (KeyboardInterrupt, SystemExit):
        raise signals.interrupted("interrupted") from None
    except Interrupted:
        raise
    except Exception as error:
        raise TrainError(state.fatal or describe(error)) from error
    return signals


def _run_on_ray(
    job: Job, state: RunState, handle: RecordHandler, display: Display, previous_attempts: int, cluster: Cluster
) -> StopSignals:
    """Run a job with Ray Train's workers; returns the stop signals that it received."""
    import ray

    trainer = job.config.trainer
    if trainer.elastic:
        job = replace(job, config=without_read_reservations(job.config))
    if cluster.local:
        job = _with_one_worker_per_gpu(job, cluster, display)
        trainer = job.config.trainer
    need = demand_of(job.config, cluster.total())
    await_resources(cluster, need, trainer.wait_for_room_s, display, job.config.name)
    if not cluster.local:
        _check_storage(job, need, cluster, display)
    count = f"{need.num_workers} to {trainer.most_workers}" if trainer.elastic else f"{need.num_workers}"
    display.say(f"Starting {count} workers ({need.worker} each) on {'a local' if cluster.local else 'the'} Ray …")
    # If this actor dies, Ray starts it again, without the records that were not taken.
    mailbox = actor_here(Mailbox, previous_attempts)
    signals = _stop_signals(job, lambda: call_actor(mailbox.request_stop), display)
    restarts: dict[int, str] = {}  # reason of a requested restart, by attempt

    def request_restart(reason: str) -> None:
        restarts[state.attempt] = reason
        call_actor(mailbox.request_restart, reason)

    def take() -> list[Record]:
        # Repeats requests, which a mailbox that replaces a lost one has not received.
        restart = restarts.get(state.attempt)
        taken: list[Record] = call_actor(mailbox.take, state.attempt, signals.received is not None, restart)
        return taken

    exported = ExportedMetrics(job.config.name, trainer.batch_size)
    evaluations: Evaluations | None = None

    def export_and_handle(record: Record) -> None:
        with display.tolerance.drop_errors():
            exported(record)
        handle(record)
        if evaluations is not None:
            evaluations(record)

    try:
        with (
            handling(signals),
            _stop_requests(job, signals),
            handling_records(take, export_and_handle, display.tolerance),
            shared(job.train, job.eval) as (train, evaluation),
            evaluating(replace(job, train=train, eval=evaluation), mailbox, state) as evaluations,
            resizing(trainer, need, state, request_restart, cluster),
            waiting_for_room(trainer.wait_for_room_s, need, mailbox, cluster, display),
            # A frozen worker process cannot report a hang, but fails Ray's health check.
            default_env({"RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": f"{trainer.hang_s:g}"}),
        ):
            job = replace(job, train=train, eval=evaluation)
            # If this thread used Ray after the end of a local Ray, Ray would end the process.
            abandoned = threading.Event() if cluster.local else None
            _fit(lambda: _train(job, mailbox, need, abandoned), signals, abandoned)
    except _RayGaveUp:
        # All records have been handled. A reason that the workers reported is more precise than Ray's.
        if state.fatal is None and state.stopped is None:
            raise
    finally:
        with suppress(Exception):  # the cluster may be gone
            ray.kill(mailbox)
        shutil.rmtree(job.files.ray_state, ignore_errors=True)
    return signals


def _check_storage(job: Job, need: Demand, cluster: Cluster, display: Display) -> None:
    """Check that the nodes that may run workers see the run folder; warn about those that the run can do without.

    Raises:
        TrainError: workers would have to run on nodes that do not see it.
    """
    import ray

    nodes, here = cluster.nodes(), ray.get_runtime_context().get_node_id()
    if os.path.isdir(job.files.converted):
        refuse_unseen(job.files.converted, need, nodes)
    if "://" in job.config.storage.path:
        return
    others = [node for node in nodes if node.id != here and capacity(need, [node], 1)]
    blind = nodes_without(str(job.folder), others) if others else []
    warning = unshared_folder(str(job.folder), need, nodes, blind)
    if warning is not None:
        display.say(f"warning: {warning}", style="yellow")


def _with_one_worker_per_gpu(job: Job, cluster: Cluster, display: Display) -> Job:
    config, requested = one_worker_per_gpu(job.config, cluster.total()), job.config.trainer.num_workers
    if config is not job.config:
        gpus = config.trainer.num_workers
        display.say(
            f"trainer.num_workers={requested} but this machine has only {gpus} GPU{'' if gpus == 1 else 's'}: using "
            f"{gpus} worker{'' if gpus == 1 else 's'}. Set trainer.use_gpu=false to run {requested} CPU workers.",
            style="yellow",
        )
    return replace(job, config=config)


class _RayGaveUp(TrainError):
    """Ray Train has ended the run."""


def _fit(fit: Callable[[], object], signals: StopSignals, abandoned: threading.Event | None) -> None:
    from ray.exceptions import RayActorError
    from ray.train import TrainingFailedError

    def abandon() -> None:
        if abandoned is not None:
            abandoned.set()
            kill_train_workers()  # the thread may wait for workers that start

    try:
        # Outside of the main thread, Ray Train installs no signal handlers.
        run_in_background(fit, signals, abandon)
    except (KeyboardInterrupt, SystemExit):
        raise signals.interrupted("interrupted") from None
    except RayActorError as error:
        raise TrainError(f"Ray Train's controller was lost: {line_of(str(error), 400)}") from error
    except TrainingFailedError as error:
        raise _RayGaveUp(_reason(error)) from error


def _train(job: Job, mailbox: Any, need: Demand, abandoned: threading.Event | None) -> None:
    from ray import cloudpickle

    from rayrec.train.driver.ray_trainer import ray_trainer

    elastic, folder = job.config.trainer.elastic, job.files.ray_state
    if elastic:
        release_request(folder)
    shutil.rmtree(folder, ignore_errors=True)
    # As bytes, so that the controller does not import the modules of the job's contents.
    trainer = ray_trainer(job.config, mailbox, need, folder, cloudpickle.dumps(job), abandoned)
    if elastic:
        note_request(folder, request_name(trainer))
    trainer.fit()


def _reason(error: Exception) -> str:
    failures = getattr(error, "worker_failures", None)
    if failures:
        return failure_reason(failures)
    cause = getattr(error, "controller_failure", error)
    return f"Ray Train gave up: {line_of(str(cause), 400)}"
