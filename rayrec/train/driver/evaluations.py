"""Evaluates checkpoints in the background (`trainer.evaluate`): one Ray actor scores them while the workers train.

    rank 0     `worker/background.py` sends a record `evaluate` for each complete checkpoint to evaluate
    driver     `Evaluations` queues it, and restarts the actor if it is lost
    actor      restores the checkpoint in one process, on its CPUs, and scores it as training does at its position
    mailbox    the records of the evaluation go to the driver's files; its outcome goes to the workers, who use it for
               `storage.keep_best`, early stopping and the plateau

No error here ends the run: it is reported, and the workers are told that the evaluation has failed.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rayrec.train.driver.elastic import without_read_reservations
from rayrec.train.driver.failures import line_of
from rayrec.train.errors import describe
from rayrec.train.run.config import EVALUATION_SHARDING
from rayrec.train.run.log import Mailbox, Record, RunState, call_actor
from rayrec.train.worker.start import import_worker

if TYPE_CHECKING:
    from rayrec.train.worker.session import Job

MOST_PENDING = 2  # besides the one that is being evaluated; each keeps a checkpoint from being removed
RESTARTS = 2  # of the actor, for one evaluation
NICENESS = 10  # more than Ray gives to all workers, so that training goes first where both share CPUs
MOST_OUTCOMES = 100  # kept for workers that restart


class CheckpointEvaluator:
    """The Ray actor that evaluates checkpoints of a run, in one process.

    Args:
        job: pickled `Job` of an evaluation.
    """

    def __init__(self, job: bytes) -> None:
        # First: threads that start later have the same priority.
        with suppress(OSError):
            os.nice(NICENESS)
        import_worker()
        from ray import cloudpickle

        from rayrec.train.worker.session import set_threads

        self._job: Job = cloudpickle.loads(job)
        set_threads(self._job.config, 2)  # half of the machine's CPUs, beside the workers

    def evaluate(self, checkpoint: str, max_rows: int | None) -> Record:
        """Evaluate a checkpoint of the run.

        Returns:
            `records` for the run's mailbox, `scores`, and `error`; of the last two, one is None.
        """
        from rayrec.train.worker.loop import score_as_training
        from rayrec.train.worker.session import session_alone

        sink = Mailbox()
        scores, error = None, None
        try:
            scores = score_as_training(replace(self._job, checkpoint=checkpoint), session_alone(sink), max_rows)
        except Exception as caught:
            error = line_of(describe(caught), 400)
        records = [record for record in sink.take() if record["kind"] in ("eval", "event")]
        for record in records:
            del record["attempt"]  # of this process's mailbox
        return {"records": records, "scores": scores, "error": error}


class Evaluations:
    """Runs the evaluations that rank 0 requests, one after the other, in a thread.

    Args:
        job: the job of the run.
        mailbox: actor handle of the run's mailbox.
        state: the state of the run, with the nodes of the workers.
    """

    def __init__(self, job: Job, mailbox: Any, state: RunState) -> None:
        self._job, self._mailbox, self._state = job, mailbox, state
        self._changed = threading.Condition()
        self._pending: deque[Record] = deque()
        self._running: Record | None = None
        self._outcomes: deque[Record] = deque(maxlen=MOST_OUTCOMES)
        self._closed = False
        self._actor: Any = None
        self._thread = threading.Thread(target=self._run, name="rayrec-evaluations", daemon=True)

    def __call__(self, record: Record) -> None:
        """Handle a record of the run; returns at once."""
        if record["kind"] == "begin":
            self._begin(record["resumed_step"] or 0)
        elif record["kind"] == "evaluate":
            self._add({name: record[name] for name in ("step", "epoch", "checkpoint", "max_rows")})

    def _begin(self, resumed_step: int) -> None:
        """Tell the workers of a new attempt what there is; drop evaluations of steps that it will train again."""
        with self._changed:
            self._pending = deque(request for request in self._pending if request["step"] <= resumed_step)
            if self._running is not None and self._running["step"] > resumed_step:
                self._running = None  # its outcome is dropped
            waiting = [*([] if self._running is None else [self._running]), *self._pending]
            known = [outcome for outcome in self._outcomes if outcome["step"] <= resumed_step]
            self._outcomes = deque(known, maxlen=MOST_OUTCOMES)
        for outcome in (*known, *({**request, "pending": True} for request in waiting)):
            self._mailbox.evaluated.remote(outcome)

    def _add(self, request: Record) -> None:
        skipped, known = None, None
        with self._changed:
            known = next((outcome for outcome in self._outcomes if request.items() <= outcome.items()), None)
            if known is None and request != self._running and request not in self._pending:
                self._pending.append(request)
                # The thread may be about to take the first one.
                if len(self._pending) + (self._running is not None) > MOST_PENDING + 1:
                    skipped = self._pending.popleft()
                self._changed.notify_all()
        if known is not None:
            self._mailbox.evaluated.remote(known)
        if skipped is not None:
            text = (
                f"Skipped the evaluation of step {skipped['step']}: {MOST_PENDING} newer ones wait for the evaluating "
                "process. Increase trainer.eval_every, or set trainer.eval_rows."
            )
            self._end(skipped, "eval_skipped", text)

    def start(self) -> None:
        """Start the thread. The actor starts with the first evaluation."""
        self._thread.start()

    def close(self) -> None:
        """End the actor and the thread; what is pending is dropped."""
        with self._changed:
            self._closed = True
            self._pending.clear()
            self._changed.notify_all()
        self._kill()
        self._thread.join(10.0)

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._closed:
                    self._changed.wait()
                if self._closed:
                    return
                request = self._running = self._pending.popleft()
            try:
                self._evaluate(request)
            except Exception as error:
                with suppress(Exception):  # the cluster may be gone
                    self._fail(request, line_of(describe(error), 400))
            with self._changed:
                self._running = None

    def _evaluate(self, request: Record) -> None:
        import ray
        from ray.exceptions import RayActorError

        step = request["step"]
        for restarts_left in reversed(range(RESTARTS + 1)):
            try:
                actor = self._actor = self._actor or self._start_actor()
                outcome = ray.get(actor.evaluate.remote(request["checkpoint"], request["max_rows"]))
                break
            except RayActorError as error:
                self._kill()
                if self._closed:
                    return
                if not restarts_left:
                    return self._fail(request, f"the process was lost {RESTARTS + 1} times: {line_of(str(error), 200)}")
                text = f"The process that evaluates step {step} was lost; starting another."
                self._event(request, "eval_restarted", text)
        if not self._is_current(request):
            return
        for record in outcome["records"]:
            call_actor(self._mailbox.put, record)
        if outcome["error"] is not None:
            return self._fail(request, outcome["error"])
        self._deliver({**request, "scores": outcome["scores"]})

    def _is_current(self, request: Record) -> bool:
        with self._changed:
            return self._running is request and not self._closed

    def _fail(self, request: Record, reason: str) -> None:
        if self._is_current(request):
            text = f"The evaluation of step {request['step']} failed ({reason}). The run continues without it."
            self._end(request, "eval_failed", text)

    def _end(self, request: Record, event: str, message: str) -> None:
        """Report an evaluation without scores."""
        self._event(request, event, message)
        self._deliver({**request, "scores": None})

    def _event(self, request: Record, event: str, message: str) -> None:
        common = {"kind": "event", "step": request["step"], "epoch": request["epoch"]}
        self._mailbox.put.remote({**common, "event": event, "message": message})

    def _deliver(self, outcome: Record) -> None:
        with self._changed:
            self._outcomes.append(outcome)
        self._mailbox.evaluated.remote(outcome)

    def _start_actor(self) -> Any:
        """The actor, on a node of the workers: those see the run's storage and data."""
        import ray
        from ray import cloudpickle
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        options: dict[str, Any] = {"num_cpus": 0}
        if self._state.nodes:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(min(self._state.nodes), soft=True)
        actor_class: Any = ray.remote(CheckpointEvaluator)
        return actor_class.options(**options).remote(cloudpickle.dumps(_evaluation_job(self._job)))

    def _kill(self) -> None:
        actor, self._actor = self._actor, None
        if actor is not None:
            import ray

            with suppress(Exception):  # it may be gone
                ray.kill(actor)


def _evaluation_job(job: Job) -> Job:
    """The job that evaluates a checkpoint of a run in one process: with a plan for one rank, without a lease."""
    config = without_read_reservations(job.config)
    sharding = config.sharding.model_copy(update=EVALUATION_SHARDING)
    trainer = config.trainer.model_copy(update={"compile_dense": False})  # it would compile for each evaluation
    return replace(
        job,
        config=config.model_copy(update={"sharding": sharding, "trainer": trainer}),
        task="evaluate",
        launch=None,
        calibration=None,
        warm_start=None,
        vectors=(),
    )


@contextmanager
def evaluating(job: Job, mailbox: Any, state: RunState) -> Iterator[Evaluations | None]:
    """While the body runs, evaluate checkpoints on request; None if the run evaluates in its workers."""
    if job.eval is None or job.task != "fit" or job.config.trainer.evaluate == "inline":
        yield None
        return
    evaluations = Evaluations(job, mailbox, state)
    evaluations.start()
    try:
        yield evaluations
    finally:
        evaluations.close()
