"""A run with a fixed number of workers that has lost a node: it waits for room, says what is missing, or gives up."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest
import yaml
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError, WorkerGroupStartupTimeoutError
from ray.train.v2._internal.execution.failure_handling import FailureDecision, create_failure_policy
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import ControllerError, WorkerGroupError

from rayrec._runtime.ray_internals import with_limit
from rayrec.models import DLRM, Batch
from rayrec.train import ConfigError, parse_config
from rayrec.train.driver.failures import MAX_FAILED_STARTS, RestartLimit
from rayrec.train.driver.resources import Demand
from rayrec.train.driver.room import RoomWait
from rayrec.train.run.log import Mailbox
from tests.train.chaos import Supervised
from tests.train.pretended_ray import Actor, PretendedRay, pretended
from tests.train.small import raw_config, run_folder, write_all

__all__ = ["pretended"]

NEED = Demand(num_workers=2, cpus_per_worker=1.0, use_gpu=False, reader_cpus=0.0)


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


def test_the_limit_is_a_time() -> None:
    assert parse_config(raw_config(Path("/nowhere"))).trainer.wait_for_room_s is None
    with pytest.raises(ConfigError, match=r"trainer\.wait_for_room_s"):
        parse_config(raw_config(Path("/nowhere"), trainer__wait_for_room_s=-1))


class Slow(DLRM):
    """So that a run is still training when its node is taken away."""

    def forward(self, batch: Batch) -> Any:
        time.sleep(0.1)
        return super().forward(batch)


class Impatient(Supervised):
    """Ray gives up each wait for room after a second, and rayrec begins the next."""

    more_env: ClassVar[dict[str, str]] = {"RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "1"}


def supervised(folder: Path, **changes: object) -> Impatient:
    write_all(folder, rows=1000)
    args = {"dense_arch": [16, 8], "over_arch": [16, 1]}
    trainer = {"num_workers": 2, "cpus_per_worker": 1.0, "checkpoint_every": 4, "epochs": 6}
    raw = raw_config(
        folder,
        model={"factory": "tests.train.test_room:Slow", "args": args},
        **{f"trainer__{name}": value for name, value in {**trainer, **changes}.items()},
    )
    (folder / "c.yaml").write_text(yaml.safe_dump(raw))
    return Impatient(folder / "c.yaml", run_folder(folder / "runs" / "small"), folder / "log", None, patience_s=200)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_run_that_lost_a_node_waits_until_another_comes(tmp_path: Path) -> None:
    """Through more waits of Ray Train's than it ends a run after by itself."""
    run = supervised(tmp_path)
    with run.on_cluster():
        run.event(("checkpoint",), 0.0)
        run.tell_cluster("remove")
        time.sleep(20)
        run.must_go_on("room")
        run.tell_cluster("add")
        run.event(("recovered",), 0.0)
        assert run.ended() == 0, run.said()
    assert json.loads(run.run.result.read_text())["recoveries"] == 1


@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_wait_for_room_has_a_limit_where_one_is_set(tmp_path: Path) -> None:
    run = supervised(tmp_path, wait_for_room_s=4)
    with run.on_cluster():
        run.event(("checkpoint",), 0.0)
        run.tell_cluster("remove")
        assert run.ended() == 1
    said = run.said()
    assert "No room for the workers within trainer.wait_for_room_s=4 s: 2 workers need 1 CPU each" in said
    assert "is intact; run the same command again to resume from it" in said
