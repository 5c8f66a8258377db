"""Running a job: in this process, or by Ray Train's workers. What is done with the outcome is `trainer.py`'s."""

from __future__ import annotations

import re
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

from rayrec.train.config import TrainerConfig
from rayrec.train.driver.cluster import Cluster, await_resources, connected
from rayrec.train.driver.console import Display
from rayrec.train.driver.resources import Demand, demand
from rayrec.train.errors import Interrupted, TrainError, describe
from rayrec.train.run_log import DirectSink, Mailbox, Record, drained
from rayrec.train.worker.entry import work_alone, work_on_ray
from rayrec.train.worker.session import Job


class Listener(Protocol):
    """Takes the records of a job, and remembers how it ended.

    Args:
        fatal: why it failed.
        done: the record of its end.
        step: the last step heard of.
    """

    fatal: str | None
    done: Record | None

    @property
    def step(self) -> int: ...

    def __call__(self, record: Record) -> None: ...


def run_job(job: Job, listener: Listener, display: Display, attempts_before: int) -> dict[str, Any]:
    """Run a job to its end and return the outcome its rank 0 told.

    Raises:
        TrainError: it failed, with the cause; `ResourceError` where Ray has not what it needs, `Interrupted` where the
            user stopped it.
    """
    if job.config.trainer.num_workers == 0:
        _run_alone(job, listener, attempts_before)
    else:
        with connected() as cluster:
            _run_on_ray(job, listener, display, attempts_before, cluster)
    if listener.fatal is not None:
        raise TrainError(listener.fatal)
    if listener.done is None:
        raise TrainError(f"the workers ended at step {listener.step} without a result; look into Ray's logs")
    outcome: dict[str, Any] = listener.done["outcome"]
    return outcome


def _run_alone(job: Job, listener: Listener, attempts_before: int) -> None:
    try:
        work_alone(job, DirectSink(Mailbox(attempts_before), listener))
    except KeyboardInterrupt:
        raise Interrupted("interrupted") from None
    except Exception as error:
        raise TrainError(listener.fatal or describe(error)) from error


def _run_on_ray(job: Job, listener: Listener, display: Display, attempts_before: int, cluster: Cluster) -> None:
    import ray

    trainer, read = job.config.trainer, job.config.data.read
    need = demand(trainer, cluster.total(), reads_on_ray=read.reader != "local", cpus_per_read=read.cpus_per_read)
    await_resources(cluster, need, trainer.wait_for_resources_s, display)
    each = "1 GPU" if need.use_gpu else f"{need.cpus_per_worker:g} CPU"
    display.say(f"starting {need.num_workers} workers ({each} each) on {'a local' if cluster.local else 'the'} Ray …")
    actor: Any = ray.remote(num_cpus=0)(Mailbox).remote(attempts_before)
    try:
        with drained(lambda: ray.get(actor.take.remote(), timeout=30), listener):
            _fit(job, actor, need, listener)
    finally:
        with suppress(Exception):  # the cluster may be gone
            ray.kill(actor)
        shutil.rmtree(job.files.ray_state, ignore_errors=True)


def _fit(job: Job, actor: Any, need: Demand, listener: Listener) -> None:
    from ray.exceptions import RayActorError
    from ray.train import TrainingFailedError

    trainer = job.config.trainer
    with _own_sigint():
        try:
            _torch_trainer(job, actor, need).fit()
        except (KeyboardInterrupt, SystemExit):
            raise Interrupted("interrupted") from None
        except RayActorError as error:
            # Ray Train answers Ctrl-C by ending its workers, and then its controller by `exit_actor`.
            if "exit_actor" in str(error):
                raise Interrupted("interrupted") from None
            raise TrainError(f"Ray Train's controller was lost: {_line(str(error), 400)}") from error
        except TrainingFailedError as error:
            if listener.fatal is None:
                raise TrainError(_gave_up(error, trainer)) from error


def _torch_trainer(job: Job, actor: Any, need: Demand) -> Any:
    import ray.train
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    trainer = job.config.trainer
    failures: Any = ray.train.FailureConfig  # typed as its older self, which lacks a limit of the controller's failures
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
            failure_config=failures(max_failures=trainer.max_failures, controller_failure_limit=3),
            callbacks=[_failure_reporter(actor)],
        ),
    )


def _failure_reporter(actor: Any) -> Any:
    """Tells the driver why a worker group failed, and ends the run where it would fail again; Ray calls it in its
    controller, which starts no new group after a callback has failed."""
    import ray
    from ray.train import UserCallback

    class FailureReporter(UserCallback):
        def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
            reason = failure_reason(worker_exceptions)
            if ray.get(actor.failed_ranks.remote(), timeout=30):
                raise TrainError(reason)
            actor.put.remote({"kind": "failure", "reason": reason})

    return FailureReporter()


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


def _gave_up(error: Exception, trainer: TrainerConfig) -> str:
    failures = getattr(error, "worker_failures", None)
    if failures:
        return (
            f"workers failed more often than trainer.max_failures={trainer.max_failures} allows; the last time: "
            f"{failure_reason(failures)}"
        )
    cause = getattr(error, "controller_failure", error)
    return f"Ray Train gave up: {_line(str(cause), 400)}"


@contextmanager
def _own_sigint() -> Iterator[None]:
    """Ray Train sets a handler for Ctrl-C and leaves it there; take it back afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: Callable[..., Any] | int | None = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
