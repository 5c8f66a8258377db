"""Running a job: in this process, or by Ray Train's workers. What is done with the outcome is `trainer.py`'s."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from rayrec.train.driver.cluster import Cluster, await_resources, connected
from rayrec.train.driver.console import Display
from rayrec.train.driver.resources import Demand, demand
from rayrec.train.driver.signals import StopSignals, listening, run_beside
from rayrec.train.errors import Interrupted, TrainError, describe
from rayrec.train.run_log import DirectSink, Mailbox, Record, drained
from rayrec.train.worker.entry import work_alone, work_on_ray
from rayrec.train.worker.session import Job


class Listener(Protocol):
    """Takes the records of a job, and remembers how it ended.

    Args:
        fatal: why it failed.
        done: the record of its end.
        stopped: what the workers said when they stopped because they were asked to.
        step: the last step heard of.
    """

    fatal: str | None
    done: Record | None
    stopped: str | None

    @property
    def step(self) -> int: ...

    def __call__(self, record: Record) -> None: ...


def run_job(job: Job, listener: Listener, display: Display, attempts_before: int) -> dict[str, Any]:
    """Run a job to its end and return the outcome its rank 0 told.

    Raises:
        TrainError: it failed, with the cause; `ResourceError` where Ray has not what it needs, `Interrupted` where it
            was stopped by SIGINT or SIGTERM.
    """
    if job.config.trainer.num_workers == 0:
        _run_alone(job, listener, display, attempts_before)
    else:
        with connected() as cluster:
            _run_on_ray(job, listener, display, attempts_before, cluster)
    if listener.fatal is not None:
        raise TrainError(listener.fatal)
    if listener.done is None:
        raise TrainError(f"the workers ended at step {listener.step} without a result; look into Ray's logs")
    outcome: dict[str, Any] = listener.done["outcome"]
    return outcome


def _stop_signals(job: Job, ask: Callable[[], object], display: Display) -> StopSignals:
    grace_s = job.config.trainer.grace_s

    def tell_and_ask() -> None:
        display.say(f"stopping: a last checkpoint within {grace_s:g} s (once more to end at once) …", style="yellow")
        ask()

    return StopSignals(tell_and_ask, grace_s)


def _run_alone(job: Job, listener: Listener, display: Display, attempts_before: int) -> None:
    mailbox = Mailbox(attempts_before)
    signals = _stop_signals(job, mailbox.ask_stop, display)
    try:
        with listening(signals):
            run_beside(lambda: work_alone(job, DirectSink(mailbox, listener)), signals)
    except (KeyboardInterrupt, SystemExit):
        raise signals.interrupted("interrupted") from None
    except Interrupted:
        raise
    except Exception as error:
        raise TrainError(listener.fatal or describe(error)) from error
    if listener.stopped is not None:
        raise signals.interrupted(listener.stopped)


def _run_on_ray(job: Job, listener: Listener, display: Display, attempts_before: int, cluster: Cluster) -> None:
    import ray

    trainer, read = job.config.trainer, job.config.data.read
    need = demand(trainer, cluster.total(), reads_on_ray=read.reader != "local", cpus_per_read=read.cpus_per_read)
    await_resources(cluster, need, trainer.wait_for_resources_s, display)
    each = "1 GPU" if need.use_gpu else f"{need.cpus_per_worker:g} CPU"
    display.say(f"starting {need.num_workers} workers ({each} each) on {'a local' if cluster.local else 'the'} Ray …")
    actor = _mailbox_actor(attempts_before)
    signals = _stop_signals(job, lambda: ray.get(actor.ask_stop.remote(), timeout=30), display)
    try:
        with listening(signals), drained(lambda: ray.get(actor.take.remote(), timeout=30), listener):
            _fit(job, actor, need, listener, signals)
    finally:
        with suppress(Exception):  # the cluster may be gone
            ray.kill(actor)
        shutil.rmtree(job.files.ray_state, ignore_errors=True)
    if listener.stopped is not None:
        raise signals.interrupted(listener.stopped)


def _mailbox_actor(attempts_before: int) -> Any:
    """The mailbox, on the driver's own node: no other node's end takes it away. Should its process end, Ray makes
    another, and what had not been taken is lost."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    made: Any = ray.remote(num_cpus=0)(Mailbox)
    return made.options(max_restarts=-1, max_task_retries=-1, scheduling_strategy=here).remote(attempts_before)


def _fit(job: Job, actor: Any, need: Demand, listener: Listener, signals: StopSignals) -> None:
    from ray.exceptions import RayActorError
    from ray.train import TrainingFailedError

    try:
        # In a thread Ray Train sets no handler of its own for Ctrl-C.
        run_beside(lambda: _torch_trainer(job, actor, need).fit(), signals)
    except (KeyboardInterrupt, SystemExit):
        raise signals.interrupted("interrupted") from None
    except RayActorError as error:
        raise TrainError(f"Ray Train's controller was lost: {_line(str(error), 400)}") from error
    except TrainingFailedError as error:
        if listener.fatal is None and listener.stopped is None:
            raise TrainError(_gave_up(error)) from error


def _torch_trainer(job: Job, actor: Any, need: Demand) -> Any:
    import ray.train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = job.config.trainer
    # Typed as its older self. How often a group is replaced is decided by the callback, which knows of progress.
    failures: Any = ray.train.FailureConfig
    resources = {"CPU": need.cpus_per_worker, **({"GPU": 1} if need.use_gpu else {})}
    shutil.rmtree(job.files.ray_state, ignore_errors=True)
    return TorchTrainer(
        work_on_ray,
        train_loop_config={"job": job, "log": actor},
        torch_config=TorchConfig(backend="nccl" if need.use_gpu else "gloo", timeout_s=trainer.timeout_s),
        scaling_config=ScalingConfig(
            num_workers=trainer.num_workers, use_gpu=need.use_gpu, resources_per_worker=resources
        ),
        run_config=RunConfig(
            name=job.config.name,
            storage_path=str(job.files.ray_state),
            failure_config=failures(max_failures=-1, controller_failure_limit=3),
            callbacks=[_failure_reporter(actor, trainer.max_failures)],
        ),
    )


def _failure_reporter(actor: Any, max_failures: int) -> Any:
    """Tells the driver why a worker group failed, and ends the run where it would fail again or has failed too often
    without getting further; Ray calls it in its controller, which starts no new group after a callback has failed."""
    import ray
    from ray.train import UserCallback

    class FailureReporter(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            reason = failure_reason(worker_exceptions)
            if ray.get(actor.failed_ranks.remote(), timeout=30) or ray.get(actor.stop_asked.remote(), timeout=30):
                raise TrainError(reason)
            failures = ray.get(actor.failed_again.remote(), timeout=30)
            if failures > max_failures:
                text = too_often(failures, max_failures, reason)
                ray.get(actor.put.remote({"kind": "fatal", "rank": 0, "error": text}), timeout=30)
                raise TrainError(text)
            actor.put.remote({"kind": "failure", "reason": reason})

    return FailureReporter()


def too_often(failures: int, max_failures: int, reason: str) -> str:
    """Why a run is given up."""
    times = "once" if failures == 1 else f"{failures} times"
    return (
        f"the workers failed {times} without a new checkpoint between, more often than "
        f"trainer.max_failures={max_failures} allows; the last time: {reason}"
    )


def failure_reason(failures: dict[int, Exception]) -> str:
    """One line for what happened to the workers, by rank: the lost ones, or else the errors of those that are left."""
    lost = {rank: text for rank, error in failures.items() if (text := _death(error))}
    if lost:
        return ", ".join(f"worker {rank} was lost: {text}" for rank, text in sorted(lost.items()))
    return ", ".join(f"worker {rank}: {_line(describe(error))}" for rank, error in sorted(failures.items()))


def _death(error: Exception) -> str | None:
    """How a worker process ended, if that is what the error says."""
    from ray.exceptions import RayActorError

    cause = getattr(error, "health_check_failure", error)
    if not isinstance(cause, RayActorError):
        return None
    text = str(cause)
    if "SIGKILL" in text or "connection error code 2" in text:
        return "its process was killed (SIGKILL, or out of memory)"
    found = re.search(r"The actor (?:is dead because|died)[^.\n]*", text)
    return _line(found.group(0) if found else text)


def _line(text: str, limit: int = 200) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")
    return line if len(line) <= limit else f"{line[: limit - 1]}…"


def _gave_up(error: Exception) -> str:
    failures = getattr(error, "worker_failures", None)
    if failures:
        return failure_reason(failures)
    cause = getattr(error, "controller_failure", error)
    return f"Ray Train gave up: {_line(str(cause), 400)}"
