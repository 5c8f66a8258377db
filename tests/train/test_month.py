"""A month of faults against the run's own decision code, with a clock of its own: only what lasts ends a run.

Then waits for room and failed starts, one by one.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.failure_handling import FailureDecision, create_failure_policy
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from rayrec._runtime.ray_internals import with_limit
from rayrec.storage import Patience
from rayrec.train import TrainError
from rayrec.train.driver.elastic import DrainNotices
from rayrec.train.driver.failures import MAX_FAILED_STARTS, RestartLimit, failure_reporter
from rayrec.train.driver.resources import Demand, Node, missing_resources
from rayrec.train.driver.room import RoomWait
from rayrec.train.run.log import Mailbox
from rayrec.train.worker.storage_retry import StorageRetry
from tests.train.pretended_ray import Actor, PretendedRay, pretended
from tests.train.small import config_of, control_of, recorder_of

__all__ = ["pretended"]

EVENTS, MONTH_S = 10_000, 30 * 86_400.0
NODES = 8
CONFIG = config_of(trainer__num_workers=NODES)
TRAINER, STORAGE = CONFIG.trainer, CONFIG.storage
CHECKPOINT_EVERY_S = 900.0
NEED = Demand(num_workers=NODES, cpus_per_worker=1.0, use_gpu=False, reader_cpus=0.0)
LOST = RayActorError(None, "The actor died because its node was lost.")


class Clock:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.now = 1e9

    def monotonic(self) -> float:
        return self.now

    time = monotonic

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Ended(Exception):
    """The run has been given up."""


class Month:
    """A run of 8 workers on 8 nodes, without the training: what its driver and Ray's controller decide.

    Args:
        folder: of the run.
        limit_s: `trainer.wait_for_room_s`.
    """

    def __init__(self, folder: Path, clock: Clock, limit_s: float | None = None) -> None:
        self.clock, self.step, self.nodes, self.came = clock, 0, [f"node{i}" for i in range(NODES)], NODES
        self.limit_s, self.attempts, self.failures = limit_s, 0, 0
        self.recorder = recorder_of(folder)
        self.launch()

    def launch(self) -> None:
        """The driver is started, or started again."""
        self.mailbox = Mailbox(self.attempts)
        self.reporter = failure_reporter(Actor(self.mailbox), TRAINER.max_failures)
        ray = create_failure_policy(FailureConfig(max_failures=-1, controller_failure_limit=-1))
        self.policy = with_limit(ray, RestartLimit(Actor(self.mailbox)))
        self.notices, self.wait = DrainNotices(), RoomWait(self.limit_s)
        self.begin()

    def begin(self) -> None:
        """A worker group starts."""
        if self.mailbox.begin(leader=True):
            raise Ended("no other attempt")
        self.attempts += 1
        step, nodes = self.step or None, self.nodes
        self.mailbox.put({"kind": "begin", "resumed_step": step, "world_size": NODES, "nodes": nodes})
        self.hear()

    def hear(self) -> None:
        for record in self.mailbox.take():
            self.recorder(record)
        if self.recorder.state.fatal is not None:
            raise Ended(self.recorder.state.fatal)

    def train(self, seconds: float) -> None:
        """Train, with a checkpoint every 15 minutes."""
        self.clock.now += seconds
        if seconds >= CHECKPOINT_EVERY_S:
            self.save()

    def save(self) -> None:
        self.step, self.failures = self.step + 1, 0
        self.mailbox.put({"kind": "event", "event": "checkpoint", "message": "saved", "step": self.step})
        self.hear()

    def failed(self, errors: dict[int, Exception]) -> None:
        """The worker group ends; Ray starts another."""
        self.failures += 1
        try:
            self.reporter.after_exception(None, errors)
        except TrainError as error:
            self.hear()
            raise Ended(str(error)) from error
        self.hear()
        self.begin()

    def not_started(self, error: Exception) -> None:
        if self.policy.make_decision(ControllerError(error)) == FailureDecision.RAISE:
            self.hear()
            raise Ended(str(error))

    def without(self, node: str, seconds: float) -> None:
        """Wait for another node in the place of one that is gone."""
        self.nodes = [name for name in self.nodes if name != node]
        there = [Node(id=name, resources={"CPU": 1.0}, free={"CPU": 1.0}) for name in self.nodes]
        for passed in range(0, int(seconds), 30):
            self.clock.now += 30
            self.wait.update(self.mailbox.idle_s(), lambda: missing_resources(NEED, there), self.clock.now)
            if self.wait.given_up is not None:
                self.mailbox.put({"kind": "fatal", "rank": 0, "error": self.wait.given_up, "final": True})
            if passed % 120 == 90:
                self.not_started(WorkerGroupStartupTimeoutError(num_workers=NODES))
        self.nodes.append(f"node{self.came}")
        self.came += 1
        self.wait.update(0.0, lambda: None, self.clock.now)


def worker_lost(run: Month, draw: random.Random) -> None:
    """Its peers have errors because of it; some tell theirs as one of the model."""
    rank = draw.randrange(NODES)
    errors: dict[int, Exception] = {peer: RuntimeError("connection closed by peer") for peer in range(NODES)}
    if draw.random() < 0.3:
        run.mailbox.put({"kind": "fatal", "rank": (rank + 1) % NODES, "error": "a peer was lost"})
    run.failed({**errors, rank: LOST})


def node_lost(run: Month, draw: random.Random) -> None:
    """Another comes after some minutes."""
    run.failures += 1
    run.reporter.after_exception(None, {0: LOST})
    run.without(draw.choice(run.nodes), draw.expovariate(1 / 600) + 60)
    run.hear()
    run.begin()


def node_announced(run: Month, draw: random.Random) -> None:
    """A spot node is taken back in two minutes: a checkpoint, and the others go on with the next node."""
    node = draw.choice(run.nodes)
    reason = run.notices.reason_to_leave(run.attempts, run.recorder.state.nodes, {node, "elsewhere"})
    assert reason is not None and run.notices.reason_to_leave(run.attempts, run.recorder.state.nodes, {node}) is None
    run.mailbox.request_restart(reason)
    run.save()
    run.reporter.after_exception(None, {0: RuntimeError("stopped to start again")})
    run.without(node, 120)
    run.hear()
    run.begin()


def storage_away(run: Month, draw: random.Random) -> None:
    """When workers load a checkpoint: within patience they wait, and beyond it they are started again, twice here."""
    back = run.clock.now + min(draw.expovariate(1 / 200), 2 * STORAGE.patience_s)

    def load() -> None:
        if run.clock.now < back:
            raise OSError("the storage is away")

    retry = StorageRetry(control_of(), Patience(outage_s=STORAGE.patience_s), lambda _: None)
    while True:
        try:
            return retry("loading", load)
        except OSError as error:
            run.failed({0: error})


def device_failed(run: Month, draw: random.Random) -> None:
    run.failed({draw.randrange(NODES): RuntimeError("CUDA error: uncorrectable ECC error encountered")})


def worker_frozen(run: Month, draw: random.Random) -> None:
    message = f"rank 3 has not moved for {TRAINER.hang_s:.0f} s"
    run.clock.now += TRAINER.hang_s
    run.mailbox.put({"kind": "event", "event": "hang", "message": message, "rank": 3})
    run.failed({3: LOST})


def start_failed(run: Month, draw: random.Random) -> None:
    for _ in range(draw.randint(1, MAX_FAILED_STARTS)):
        run.not_started(WorkerGroupStartupFailedError("an actor died"))
    run.policy.make_decision(ControllerError(WorkerGroupStartupTimeoutError(num_workers=NODES)))


def driver_restarted(run: Month, draw: random.Random) -> None:
    run.launch()


FAULTS: tuple[Callable[[Month, random.Random], object], ...] = (
    worker_lost,
    node_lost,
    node_announced,
    storage_away,
    device_failed,
    worker_frozen,
    start_failed,
    driver_restarted,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch, pretended: PretendedRay) -> Iterator[Clock]:
    made = Clock()
    logging.disable(logging.CRITICAL)  # Ray logs each decision at length
    for module in ("run.log", "worker.storage_retry"):
        monkeypatch.setattr(f"rayrec.train.{module}.time", made)
    monkeypatch.setattr("rayrec.train.worker.storage_retry.StorageRetry._reporting", _silent)
    yield made
    logging.disable(logging.NOTSET)


def _silent(self: Any, what: str) -> Any:
    from contextlib import nullcontext

    return nullcontext([].append)  # its thread would look at the month's clock


def test_a_month_of_faults_ends_no_run(tmp_path: Path, clock: Clock) -> None:
    draw, run, met = random.Random(7), Month(tmp_path, clock), Counter[str]()
    for _ in range(EVENTS):
        quiet_s = draw.expovariate(EVENTS / MONTH_S)
        if run.failures > TRAINER.max_failures - 2:
            quiet_s = max(quiet_s, CHECKPOINT_EVERY_S)  # more of them without a checkpoint between end a run
        run.train(quiet_s)
        fault = draw.choice(FAULTS)
        met[fault.__name__] += 1
        fault(run, draw)
    assert set(met) == {fault.__name__ for fault in FAULTS} and met.total() == EVENTS
    assert run.recorder.state.fatal is None and run.recorder.state.attempt == run.attempts
    assert run.recorder.recoveries > EVENTS / 3 and run.clock.now - 1e9 > MONTH_S


def model_is_wrong(run: Month) -> None:
    run.mailbox.put({"kind": "fatal", "rank": 1, "error": "a label is 2"})
    run.failed({0: RuntimeError("a peer has failed"), 1: ValueError("a label is 2")})


def fails_at_one_place(run: Month) -> None:
    for _ in range(TRAINER.max_failures + 1):
        run.train(60.0)
        run.failed({0: OSError("away")})


def never_starts(run: Month) -> None:
    for _ in range(MAX_FAILED_STARTS + 1):
        run.not_started(WorkerGroupStartupFailedError("an actor died"))


def has_waited_too_long(run: Month) -> None:
    run.reporter.after_exception(None, {0: LOST})
    run.without("node3", 7200.0)


@pytest.mark.parametrize(
    ("ends", "reason"),
    [
        (model_is_wrong, "a label is 2"),
        (fails_at_one_place, r"trainer\.max_failures=\d+ is the limit"),
        (never_starts, "an actor died"),
        (has_waited_too_long, r"No room for the workers within trainer\.wait_for_room_s=3600 s"),
    ],
)
def test_what_does_end_a_run(ends: Callable[[Month], None], reason: str, tmp_path: Path, clock: Clock) -> None:
    with pytest.raises(Ended, match=reason):
        ends(Month(tmp_path, clock, limit_s=3600.0))


def test_a_wait_is_told_once_a_minute_and_ends_at_its_limit() -> None:
    for limit_s in (None, 200.0):
        wait = RoomWait(limit_s)
        assert wait.update(0.0, lambda: "a node", 1000.0) is None, "the workers run"
        lines = {second: wait.update(5.0, lambda: "a node", 1000.0 + second) for second in range(0, 190, 10)}
        told = {second: line for second, line in lines.items() if line is not None}
        assert told == {60 * n: f"Waiting for room, {n} min so far: a node." for n in (1, 2, 3)}
        assert wait.given_up is None
        assert wait.update(5.0, lambda: None, 1195.0) is None, "there is room: the workers are started"
        wait.update(5.0, lambda: "a node", 1300.0)
        wait.update(5.0, lambda: "a node", 1499.0)
        assert wait.given_up is None, "each wait counts for itself"
        wait.update(5.0, lambda: "a node", 1500.0)
        text = "No room for the workers within trainer.wait_for_room_s=200 s: a node."
        assert wait.given_up == (None if limit_s is None else text)


def test_a_run_that_does_not_wait_leaves_ray_time_to_free_resources() -> None:
    wait = RoomWait(0.0, least_s=30.0)
    assert wait.update(5.0, lambda: "a node", 1000.0) is None and wait.given_up is None
    wait.update(5.0, lambda: "a node", 1029.0)
    assert wait.given_up is None
    wait.update(5.0, lambda: "a node", 1030.0)
    assert wait.given_up == "No room for the workers and the run does not wait (trainer.wait_for_room_s=0): a node."
    assert RoomWait(0.0).update(1.0, lambda: None, 1000.0) is None


def test_the_mailbox_knows_whether_there_are_workers() -> None:
    box = Mailbox()
    time.sleep(0.01)
    assert box.idle_s() > 0
    box.begin(leader=True)
    assert box.idle_s() == 0
    for kind in ("failure", "restart"):
        box.put({"kind": kind, "reason": "x"})
        time.sleep(0.01)
        assert 0 < box.idle_s() < 60
        box.put({"kind": "progress", "step": 1})
        assert box.idle_s() == 0


def test_waits_are_not_counted_and_failed_starts_are_in_a_row(pretended: PretendedRay) -> None:
    """Ray's own policy counts both over the whole run."""
    box = Mailbox()
    policy = with_limit(
        create_failure_policy(FailureConfig(max_failures=-1, controller_failure_limit=-1)), RestartLimit(Actor(box))
    )
    late = ControllerError(WorkerGroupStartupTimeoutError(num_workers=2))
    failed = ControllerError(WorkerGroupStartupFailedError("an actor died"))
    lost = WorkerGroupError("a worker was lost", {0: ValueError("x")})
    for _ in range(20):
        assert policy.make_decision(late) == FailureDecision.RETRY
        for error in [failed] * MAX_FAILED_STARTS + [lost]:
            assert policy.make_decision(error) == FailureDecision.RETRY
    decisions = [policy.make_decision(failed) for _ in range(MAX_FAILED_STARTS + 1)]
    assert decisions == [FailureDecision.RETRY] * MAX_FAILED_STARTS + [FailureDecision.RAISE]
    assert policy.make_decision(ControllerError(ValueError("a bug"))) == FailureDecision.RAISE
    assert policy.make_decision(late) == FailureDecision.RETRY
    box.put({"kind": "fatal", "rank": 0, "error": "no room", "final": True})
    assert policy.make_decision(late) == FailureDecision.RAISE
