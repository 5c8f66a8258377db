"""Running a job: in this process, or by Ray Train's workers. What is done with the outcome is `trainer.py`'s."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rayrec.data.stream.shared_manifest import shared
from rayrec.storage.parallel import actor_here
from rayrec.train.driver.cluster import Cluster, await_resources, connected, refuse_unseen
from rayrec.train.driver.console import Display
from rayrec.train.driver.elastic import NEVER_S, avoiding, note_request, reading_unreserved, release_request, resizing
from rayrec.train.driver.failures import failure_reason, failure_reporter, line_of, patient
from rayrec.train.driver.local_group import run_here
from rayrec.train.driver.ray_start import defaults
from rayrec.train.driver.resources import Demand, demand_of, for_its_gpus
from rayrec.train.driver.room import waiting_for_room
from rayrec.train.driver.signals import StopSignals, listening, run_beside
from rayrec.train.driver.trackers import ExportedMetrics
from rayrec.train.errors import Interrupted, TrainError, describe
from rayrec.train.run.log import Course, Mailbox, Record, ask, drained
from rayrec.train.worker.start import start_worker

if TYPE_CHECKING:
    from rayrec.train.worker.session import Job


Hear = Callable[[Record], object]


def run_job(job: Job, course: Course, hear: Hear, display: Display, attempts_before: int) -> dict[str, Any]:
    """Run a job to its end and return the outcome that its rank 0 reported.

    Args:
        course: heard by `hear`, which takes the records.

    Raises:
        TrainError: it failed, with the cause; `ResourceError` where Ray has not what it needs, `Interrupted` where it
            was stopped by a signal.
    """
    if job.config.trainer.num_workers == 0:
        signals = _run_alone(job, course, hear, display, attempts_before)
    else:
        with connected(job.config.trainer.elastic) as cluster:
            signals = _run_on_ray(job, course, hear, display, attempts_before, cluster)
    if course.stopped is not None:
        raise signals.interrupted(course.stopped)
    if course.fatal is not None:
        raise TrainError(course.fatal)
    if course.done is None:
        raise TrainError(f"the workers ended at step {course.step} without a result; look into Ray's logs")
    outcome: dict[str, Any] = course.done["outcome"]
    return outcome


def _stop_signals(job: Job, ask: Callable[[], object], display: Display) -> StopSignals:
    grace_s = job.config.trainer.grace_s

    def ask_and_report() -> None:
        try:
            ask()
        finally:
            text = f"stopping: a last checkpoint within {grace_s:g} s (once more to end at once) …"
            display.say(text, style="yellow")

    return StopSignals(ask_and_report, grace_s)


def _run_alone(job: Job, course: Course, hear: Hear, display: Display, attempts_before: int) -> StopSignals:
    """Run it in this process, and return what signals came meanwhile."""
    import torch

    from rayrec.train.worker.entry import work_alone

    if job.task == "fit" and job.config.trainer.use_gpu is not False and torch.cuda.is_available():
        text = "trainer.num_workers=0 trains on CPUs, and this machine has a GPU: trainer.num_workers=1 trains on it"
        display.say(text, style="yellow")
    mailbox = Mailbox(attempts_before)
    signals = _stop_signals(job, mailbox.ask_stop, display)
    try:
        with listening(signals), drained(mailbox.take, hear, display.tolerance):
            run_beside(lambda: work_alone(job, mailbox), signals)
    except (KeyboardInterrupt, SystemExit):
        raise signals.interrupted("interrupted") from None
    except Interrupted:
        raise
    except Exception as error:
        raise TrainError(course.fatal or describe(error)) from error
    return signals


def _run_on_ray(
    job: Job, course: Course, hear: Hear, display: Display, attempts_before: int, cluster: Cluster
) -> StopSignals:
    """Run it by Ray Train's workers, and return what signals came meanwhile."""
    import ray

    trainer = job.config.trainer
    if trainer.elastic:
        job = replace(job, config=reading_unreserved(job.config))
    if cluster.local:
        job = _for_its_gpus(job, cluster, display)
        trainer = job.config.trainer
    need = demand_of(job.config, cluster.total())
    await_resources(cluster, need, trainer.wait_for_resources_s, display)
    if not cluster.local and os.path.isdir(job.files.converted):
        refuse_unseen(job.files.converted, need.use_gpu)
    each = "1 GPU" if need.use_gpu else f"{need.cpus_per_worker:g} CPU"
    number = f"{need.num_workers} to {trainer.most_workers}" if trainer.elastic else f"{need.num_workers}"
    display.say(f"starting {number} workers ({each} each) on {'a local' if cluster.local else 'the'} Ray …")
    actor = actor_here(Mailbox, attempts_before)  # of a second one, what had not been taken is lost
    signals = _stop_signals(job, lambda: ask(actor.ask_stop), display)
    exported = ExportedMetrics(job.config.name, trainer.batch_size)

    def heard(record: Record) -> None:
        with display.tolerance:
            exported(record)
        hear(record)

    try:
        with (
            listening(signals),
            drained(lambda: ask(actor.take), heard, display.tolerance),
            shared(job.train, job.eval) as (train, evaluation),
            resizing(trainer, need, course, lambda reason: ask(actor.ask_restart, reason), cluster.local),
            waiting_for_room(trainer.wait_for_room_s, need, actor, cluster, display),
            # A process that is frozen as a whole cannot report: Ray's controller gets no answer.
            defaults({"RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S": f"{trainer.hang_s:g}"}),
        ):
            _fit(replace(job, train=train, eval=evaluation), actor, need, signals, cluster)
    except _GaveUp:
        if course.fatal is None and course.stopped is None:  # all records have been heard by now
            raise
    finally:
        with suppress(Exception):  # the cluster may be gone
            ray.kill(actor)
        shutil.rmtree(job.files.ray_state, ignore_errors=True)
    return signals


def _for_its_gpus(job: Job, cluster: Cluster, display: Display) -> Job:
    config, wanted = for_its_gpus(job.config, cluster.total()), job.config.trainer.num_workers
    if config is not job.config:
        gpus = config.trainer.num_workers
        text = f"this machine has {gpus} GPU{'' if gpus == 1 else 's'} for trainer.num_workers={wanted}: training with "
        text += f"{gpus}, one a GPU; trainer.use_gpu=false trains with {wanted} on CPUs"
        display.say(text, style="yellow")
    return replace(job, config=config)


class _GaveUp(TrainError):
    """Ray Train has ended the run; what the workers said of it counts more."""


def _fit(job: Job, actor: Any, need: Demand, signals: StopSignals, cluster: Cluster) -> None:
    from ray.exceptions import RayActorError
    from ray.train import TrainingFailedError

    left = threading.Event()
    try:
        # In a thread Ray Train sets no handler of its own for Ctrl-C.
        run_beside(lambda: _torch_trainer(job, actor, need, cluster, left).fit(), signals)
    except (KeyboardInterrupt, SystemExit):
        raise signals.interrupted("interrupted") from None
    except RayActorError as error:
        raise TrainError(f"Ray Train's controller was lost: {line_of(str(error), 400)}") from error
    except TrainingFailedError as error:
        raise _GaveUp(_reason(error)) from error
    finally:
        left.set()


def _torch_trainer(job: Job, actor: Any, need: Demand, cluster: Cluster, left: threading.Event) -> Any:
    import ray.train
    from ray import cloudpickle
    from ray.train import RunConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    # Each starts a process, of 1 s of CPU time, in every worker group: a manager of Ray Train's own data sets, which
    # rayrec has none of; and one that frees what a lost controller holds, which a local Ray's end does as well.
    unneeded = {"DatasetsCallback", *(["PlacementGroupCleanerCallback"] if cluster.local else [])}

    torch_trainer: Any = TorchTrainer

    class Trainer(torch_trainer):
        def _create_default_callbacks(self) -> list[Any]:  # should a later Ray not ask for it, only time is lost
            return [made for made in super()._create_default_callbacks() if type(made).__name__ not in unneeded]

        def _initialize_and_run_controller(self, **given: Any) -> Any:
            if "failure_policy" in given:  # of Ray 2.60; not promised
                given["failure_policy"] = patient(given["failure_policy"], actor)
            if trainer.elastic and "scaling_policy" in given:
                avoiding(given["scaling_policy"])
            return run_here(left, given) if cluster.local else super()._initialize_and_run_controller(**given)

    trainer = job.config.trainer
    # Typed as their older selves. How often a group is replaced is decided by the callback, which knows of progress.
    failures: Any = ray.train.FailureConfig
    scaling: Any = ray.train.ScalingConfig
    if trainer.elastic:
        release_request(job.files.ray_state)
    shutil.rmtree(job.files.ray_state, ignore_errors=True)
    made = Trainer(
        start_worker,
        # As bytes: the controller passes the job on and need not import what it is made of.
        train_loop_config={"job": cloudpickle.dumps(job), "log": actor},
        torch_config=TorchConfig(backend="nccl" if need.use_gpu else "gloo", timeout_s=trainer.timeout_s),
        scaling_config=scaling(
            num_workers=(trainer.least_workers, trainer.most_workers) if trainer.elastic else trainer.least_workers,
            use_gpu=need.use_gpu,
            resources_per_worker=need.each,
            elastic_resize_monitor_interval_s=NEVER_S,  # Ray grows in mid-step; `elastic.py` does it at a checkpoint
        ),
        run_config=RunConfig(
            name=job.config.name,
            storage_path=str(job.files.ray_state),
            # A wait for room that has ended counts as a failure of the controller, over the whole run: `room.py` limits
            # waits, `patient` failed starts.
            failure_config=failures(max_failures=-1, controller_failure_limit=-1),
            callbacks=[failure_reporter(actor, trainer.max_failures)],
        ),
    )
    if trainer.elastic:
        note_request(job.files.ray_state, made)
    return made


def _reason(error: Exception) -> str:
    failures = getattr(error, "worker_failures", None)
    if failures:
        return failure_reason(failures)
    cause = getattr(error, "controller_failure", error)
    return f"Ray Train gave up: {line_of(str(cause), 400)}"
