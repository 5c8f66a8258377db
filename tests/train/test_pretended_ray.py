"""What the driver asks of Ray and makes of its answers, with a Ray that runs nothing (`pretended_ray.py`)."""

from __future__ import annotations

import inspect
import io
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray.train.torch
import ray.util
import torch
import torch.distributed as dist
from ray import cloudpickle
from ray.data._internal.cluster_autoscaler import default_cluster_autoscaler_v2
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train import ControllerError, WorkerGroupError
from ray.train.torch import TorchTrainer
from rich.console import Console

from rayrec.train import Display, Interrupted, ResourceError, TrainError
from rayrec.train.driver import elastic, room
from rayrec.train.driver.cluster import Cluster, connected
from rayrec.train.driver.failures import SHUTDOWN_TIMEOUT, RestartLimit, failure_reporter
from rayrec.train.driver.resources import Demand
from rayrec.train.driver.run_job import run_job
from rayrec.train.driver.trackers import GAUGES, ExportedMetrics
from rayrec.train.run.log import Mailbox, Record, sink_to
from rayrec.train.worker.start import start_worker
from tests.ranks import on_ranks
from tests.train.pretended_ray import Actor, PretendedRay, pretended, set_seconds
from tests.train.small import config_of, make_job, raw_config, recorder_of, write_all

__all__ = ["pretended"]


class Attempt:
    """The attempt that runs."""

    def __init__(self, world_size: int, nodes: Collection[str] = ()) -> None:
        self.attempt, self.world_size, self.nodes = 1, world_size, frozenset(nodes)
        self.failed_nodes: frozenset[str] = frozenset()


class Account:
    """Ray Train's account of the cluster."""

    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def cancel_request(self, name: str) -> None:
        self.cancelled.append(name)


def with_account(pretended: PretendedRay, account: Account) -> Account:
    pretended.named["AutoscalingCoordinator", "AutoscalingCoordinator"] = Actor(account)
    return account


def node(name: str, cpus: float = 1.0, alive: bool = True) -> dict[str, Any]:
    return {"NodeID": name, "Resources": {"CPU": cpus}, "Alive": alive}


def shown() -> tuple[Display, Callable[[], list[str]]]:
    out = io.StringIO()
    return Display(Console(file=out, width=200)), lambda: out.getvalue().splitlines()


def test_why_a_worker_group_failed_is_told_and_another_one_started(
    pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SHUTDOWN_TIMEOUT, "5")
    box = Mailbox()
    reporter = failure_reporter(Actor(box), max_failures=2)
    monkeypatch.delenv(SHUTDOWN_TIMEOUT)
    failed = {1: ValueError("a label is 2")}
    for _ in range(2):
        reporter.after_exception(None, failed)
    assert [{**record, "time": 0} for record in box.take()] == [
        {"kind": "failure", "reason": "worker 1: a label is 2", "attempt": 0, "time": 0}
    ] * 2
    assert os.environ[SHUTDOWN_TIMEOUT] == "5", "a controller elsewhere has not the driver's environment"
    with pytest.raises(TrainError, match=r"failed 3 times .*max_failures=2 is .* Last failure: worker 1: a label"):
        reporter.after_exception(None, failed)
    (record,) = box.take()
    assert (record["kind"], record["rank"]) == ("fatal", 0) and record["error"].startswith("The workers failed 3 times")


def test_what_a_worker_said_before_it_ended_itself_is_the_reason(pretended: PretendedRay) -> None:
    box = Mailbox()
    box.begin(leader=True)
    box.put({"kind": "event", "event": "unlike", "message": "ranks wait for each other", "rank": 1})
    reporter = failure_reporter(Actor(box), max_failures=9)
    reporter.after_exception(None, {0: OSError("away")})
    box.begin(leader=True)
    reporter.after_exception(None, {0: OSError("away")})
    reasons = [record["reason"] for record in box.take() if record["kind"] == "failure"]
    assert reasons == ["ranks wait for each other", "worker 0: OSError: away"]


@pytest.mark.parametrize("why", ["failed", "stopped"])
def test_a_run_that_has_failed_or_is_to_stop_starts_no_other_group(
    pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    monkeypatch.delenv(SHUTDOWN_TIMEOUT, raising=False)
    box = Mailbox()
    reporter = failure_reporter(Actor(box), max_failures=9)
    if why == "failed":
        box.put({"kind": "fatal", "rank": 1, "error": "x"})
    else:
        box.request_stop()
    box.take()
    with pytest.raises(TrainError, match="worker 0: OSError: away"):
        reporter.after_exception(None, {0: OSError("away")})
    assert box.take() == [] and SHUTDOWN_TIMEOUT not in os.environ


def test_a_mailbox_that_does_not_answer_is_no_reason_to_end(pretended: PretendedRay) -> None:
    """Its node may be busy with a thousand other ranks; Ray Train ends a run whose callback raises."""

    class Silent(Mailbox):
        silent = True

        def exit_reason(self) -> str | None:
            if self.silent:
                raise GetTimeoutError("no answer within 30 s")
            return super().exit_reason()

        def num_failed_ranks(self) -> int:
            raise GetTimeoutError("no answer within 30 s")

    box = Silent()
    reporter = failure_reporter(Actor(box), max_failures=2)
    failed = {0: OSError("away")}
    reporter.after_exception(None, failed)
    reporter.after_exception(None, failed)
    with pytest.raises(TrainError, match=r"failed 3 times .* Last failure: worker 0: OSError: away"):
        reporter.after_exception(None, failed)
    assert not RestartLimit(Actor(box))(OSError("no room")), "a start is tried again"


def test_workers_that_end_to_be_more_have_not_failed(pretended: PretendedRay) -> None:
    box = Mailbox()
    box.request_restart("room")
    failure_reporter(Actor(box), max_failures=0).after_exception(None, {0: OSError("away")})
    (record,) = box.take()
    assert (record["kind"], record["reason"]) == ("restart", "room") and box.count_failure() == 1


def test_a_sink_of_an_actor_is_its_mailbox(pretended: PretendedRay) -> None:
    box = Mailbox(2)
    sink = sink_to(Actor(box))
    assert sink.begin(leader=True) is False and sink.num_failed_ranks() == 0
    assert sink.stop_requested() is False and sink.restart_reason() is None
    sink.put({"kind": "a"})
    sink.flush({"kind": "fatal", "rank": 1})
    assert [(record["kind"], record["attempt"]) for record in box.take()] == [("a", 3), ("fatal", 3)]
    assert sink.num_failed_ranks() == 1 and sink.begin(leader=False) is True
    sink.report_waiting(0, (7, "here"))
    assert sink.waiting_ranks() == {0: (7, "here")}
    box.request_restart("room")
    assert sink.stop_requested() is True and sink.restart_reason() == "room"


def test_a_ray_that_is_there_is_used_and_left(pretended: PretendedRay) -> None:
    with connected() as cluster:
        assert not cluster.local and cluster.subject == "the Ray cluster has"
        assert os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] == "120"
    with connected(elastic=True):
        assert os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"] == "10"
    assert pretended.begun == [] and pretended.shut_down == 0


def test_a_ray_that_an_address_names_is_left_at_the_end(
    pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    pretended.up = False
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    monkeypatch.delenv("RAY_USAGE_STATS_ENABLED", raising=False)
    before = signal.getsignal(signal.SIGTERM)
    with connected() as cluster:
        assert not cluster.local and "RAY_USAGE_STATS_ENABLED" not in os.environ
        assert (pretended.begun[0]["address"], pretended.shut_down) == ("10.0.0.1:6379", 0)
    assert (len(pretended.begun), pretended.shut_down) == (1, 1) and signal.getsignal(signal.SIGTERM) is before
    for error, reason in ((ConnectionError(" first\nsecond"), "first"), (RuntimeError(), "RuntimeError")):
        pretended.refuses = error
        refused = pytest.raises(TrainError, match=rf"RAY_ADDRESS=10.0.0.1:6379: no Ray .* answers \({reason}\)")
        with refused, connected():
            pass
    assert pretended.shut_down == 1, "there is none to leave"


def test_a_ray_of_this_machine_is_begun_and_ended_with_the_run(pretended: PretendedRay) -> None:
    pretended.up = False
    with connected() as cluster:
        assert cluster.local and cluster.subject == "this machine has"
        assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
        assert [given["address"] for given in pretended.begun] == ["local"]
        assert pretended.hangups_blocked == [True], "its processes outlive the terminal, for a last checkpoint"
    assert signal.SIGHUP not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert pretended.shut_down == 1
    pretended.refuses = Exception("The current node timed out during startup. This could happen because")  # as of Ray
    late = pytest.raises(ValueError, match=r"did not start on this machine within 30 s: .* set RAY_ADDRESS=auto")
    with late, connected():
        pass
    pretended.refuses = Exception("another")
    with pytest.raises(Exception, match=r"^another$"), connected():
        pass


NEED = Demand(num_workers=2, cpus_per_worker=1.0, use_gpu=True, reader_cpus=0.5)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    set_seconds(monkeypatch, room, CHECK_EVERY_S=0.01, REPORT_EVERY_S=0.0)


def becomes(pretended: PretendedRay, lines: Callable[[], list[str]], resources: dict[str, float]) -> threading.Thread:
    """Gives the cluster these resources, all of them free, once the wait has been reported twice."""

    def change() -> None:
        until = time.monotonic() + 120
        while len(lines()) < 2 and time.monotonic() < until:
            time.sleep(0.005)
        pretended.resources, pretended.free = resources, None

    thread = threading.Thread(target=change)
    thread.start()
    return thread


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize(
    ("resources", "free", "lack"),
    [
        (
            {"CPU": 3.0, "GPU": 2.0},
            {"CPU": 1.0},
            "2 workers need 1 GPU each, and reading 0.5 CPUs; 1 CPUs and 0 GPUs of the cluster are free, with room "
            "for 0",
        ),
        ({"CPU": 1.0}, None, "2 workers need 1 GPU each; the cluster has 1 node with room for 0"),
    ],
)
def test_a_run_says_what_it_waits_for(
    pretended: PretendedRay, resources: dict[str, float], free: dict[str, float] | None, lack: str
) -> None:
    display, lines = shown()
    pretended.resources, pretended.free = resources, free
    change = becomes(pretended, lines, {"CPU": 2.5, "GPU": 2.0})
    room.await_resources(Cluster(local=False), NEED, None, display)
    change.join()
    assert lines()[0] == f"Waiting for room: {lack}. Ctrl-C ends the wait."
    assert lines()[1] == f"Waiting for room, 0 min so far: {lack}."
    before = lines()
    room.await_resources(Cluster(local=False), NEED, 0.0, display)
    assert lines() == before, "what fits at once is not waited for"


@pytest.mark.usefixtures("soon")
def test_a_cluster_that_may_grow_is_asked_to_until_it_has(pretended: PretendedRay) -> None:
    display, lines = shown()
    pretended.resources = {"CPU": 1.0}
    pretended.coordinator().target.request_resources("another", [{"CPU": 7.0}], 180)
    change = becomes(pretended, lines, {"CPU": 2.5, "GPU": 2.0})
    room.await_resources(Cluster(local=False), NEED, None, display)
    change.join()
    mine = [NEED.per_worker, NEED.per_worker, {"CPU": 0.5}]
    assert pretended.requested == [[{"CPU": 7.0}], [{"CPU": 7.0}, *mine], [{"CPU": 7.0}]]


@pytest.mark.usefixtures("soon")
def test_runs_that_wait_do_not_withdraw_each_others_requests(pretended: PretendedRay) -> None:
    """The autoscaler knows one value for the whole cluster; `request_resources` of its public interface sets it."""
    pretended.resources = {"CPU": 1.0}
    small = replace(NEED, num_workers=1, use_gpu=False, cpus_per_worker=2.0, reader_cpus=0.0)
    display, lines = shown()
    failed: list[BaseException] = []

    def first() -> None:
        try:
            room.await_resources(Cluster(local=False), NEED, None, display, "first")
        except BaseException as error:
            failed.append(error)

    waiting = threading.Thread(target=first)
    waiting.start()
    until = time.monotonic() + 120
    while len(lines()) < 2 and time.monotonic() < until:
        time.sleep(0.005)
    mine = [NEED.per_worker, NEED.per_worker, {"CPU": 0.5}]
    assert pretended.requested[-1] == mine
    second, more = shown()
    change = becomes(pretended, more, {"CPU": 2.0})
    room.await_resources(Cluster(local=False), small, None, second, "second")
    change.join()
    assert pretended.requested[-2:] == [[*mine, {"CPU": 2.0}], mine]
    pretended.resources = {"CPU": 2.5, "GPU": 2.0}
    waiting.join()
    assert pretended.requested[-1] == [] and not failed


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("limit_s", [0.0, 0.05])
@pytest.mark.parametrize(
    ("resources", "free", "words"),
    [
        ({"CPU": 2.0, "GPU": 2.0}, None, "the run needs 2.5 CPUs .*, but the Ray cluster has 2;"),
        ({"CPU": 3.0, "GPU": 1.0}, None, "needs 2 GPUs \\(one per worker\\), but the Ray cluster has 1;"),
        ({"CPU": 3.0}, None, "needs 2 GPUs \\(one per worker\\), but the Ray cluster has 0;"),
        ({"GPU": 2.0}, None, "the run needs 2.5 CPUs .*, but the Ray cluster has 0;"),
        (
            {"CPU": 3.0, "GPU": 2.0},
            {"CPU": 2.0, "GPU": 2.0},
            r"No room for the workers .*trainer\.wait_for_room_s=0.*: ",
        ),
    ],
)
def test_a_run_without_room_is_refused_in_time(
    pretended: PretendedRay, limit_s: float, resources: dict[str, float], free: dict[str, float] | None, words: str
) -> None:
    pretended.resources, pretended.free = resources, free
    display, lines = shown()
    with pytest.raises(ResourceError, match=words):
        room.await_resources(Cluster(local=False), NEED, limit_s, display)
    assert bool(lines()) == (limit_s > 0) and pretended.requested[-1:] in ([], [[]])


def status_of(*node_types: str) -> bytes:
    return json.dumps({"autoscaler_report": {"active_nodes": dict.fromkeys(node_types, 1)}}).encode()


UNMANAGED = "node_" + "3e" * 28


@pytest.mark.usefixtures("soon")
@pytest.mark.parametrize("status", [None, b"{}", status_of(), status_of(UNMANAGED)])
def test_more_than_a_cluster_of_fixed_size_has_is_refused(
    pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch, status: bytes | None
) -> None:
    pretended.resources, pretended.autoscaler = {"CPU": 1.0, "GPU": 8.0}, status
    set_seconds(monkeypatch, room, JOINING_S=0.05)
    with pytest.raises(ResourceError, match=r"the run needs 2\.5 CPUs .*, but the Ray cluster has 1;"):
        room.await_resources(Cluster(local=False), NEED, None, shown()[0])
    pretended.resources = {"CPU": 3.0, "GPU": 2.0}
    pinned = replace(
        NEED,
        selection=config_of(
            trainer__num_workers=1, trainer__resources={"label_selector": {"region": "in(a, b)"}}
        ).trainer.resources,
    )
    with pytest.raises(ResourceError, match=r"need 1 GPU, label region=in\(a, b\) each; .* for 0; change trainer\.res"):
        room.await_resources(Cluster(local=False), pinned, None, shown()[0])


@pytest.mark.usefixtures("soon")
def test_an_autoscaler_is_waited_for(pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch) -> None:
    pretended.resources, pretended.autoscaler = {"CPU": 1.0}, status_of(UNMANAGED, "gpu-workers")
    set_seconds(monkeypatch, room, JOINING_S=0.0)
    display, lines = shown()
    change = becomes(pretended, lines, {"CPU": 2.5, "GPU": 2.0})
    room.await_resources(Cluster(local=False), NEED, None, display)
    change.join()


def test_this_machine_does_not_grow_by_waiting(pretended: PretendedRay) -> None:
    pretended.resources, pretended.free = {"CPU": 2.5, "GPU": 2.0}, {}
    room.await_resources(Cluster(local=True), NEED, None, shown()[0])
    pretended.resources = {"CPU": 2.0, "GPU": 2.0}
    with pytest.raises(ResourceError, match="but this machine has 2;"):
        room.await_resources(Cluster(local=True), NEED, None, shown()[0])


def test_what_a_killed_driver_has_requested_is_withdrawn(pretended: PretendedRay, tmp_path: Path) -> None:
    account = with_account(pretended, Account())
    elastic.release_request(tmp_path)
    assert account.cancelled == [], "nothing was requested"
    (tmp_path / elastic.REQUEST).write_text("train-abc")
    elastic.release_request(tmp_path)
    assert account.cancelled == ["train-abc"]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    set_seconds(monkeypatch, elastic, CHECK_EVERY_S=0.001, SETTLED_S=0.0)


def grown(pretended: PretendedRay, workers: Any, running: int, comes: dict[str, Any]) -> int:
    """How often growth was asked for in the looks after a node came."""
    need = Demand(num_workers=1, cpus_per_worker=1.0, use_gpu=False, reader_cpus=0.0)
    asked: list[str] = []
    with elastic.resizing(
        config_of(trainer__num_workers=workers).trainer, need, Attempt(running), asked.append, Cluster(local=False)
    ):
        look_more(pretended)
        assert not asked, "all nodes were there when it began"
        pretended.nodes = [*pretended.nodes, comes]
        look_more(pretended)
    assert not [thread for thread in threading.enumerate() if thread.name == "rayrec-elastic.resizing"]
    return len(asked)


def look_more(pretended: PretendedRay) -> None:
    """Returns when the nodes have been looked at a few times more."""
    before, until = pretended.looks, time.monotonic() + 120
    while pretended.looks < before + 4 and time.monotonic() < until:
        time.sleep(0.001)


@pytest.mark.usefixtures("often")
def test_growth_is_asked_for_when_a_node_comes(pretended: PretendedRay) -> None:
    pretended.nodes = [node("a"), node("b", alive=False)]
    assert grown(pretended, [1, 2], 1, node("c")) == 1
    assert grown(pretended, [1, 2], 2, node("d")) == 0, "there are all that may be"
    assert grown(pretended, [1, 9], 3, node("e", cpus=0.5)) == 0, "it is too small"


@pytest.mark.usefixtures("often")
def test_what_other_jobs_have_taken_is_no_room(pretended: PretendedRay) -> None:
    pretended.nodes, pretended.free = [node("a", cpus=4.0)], {"CPU": 0.5}
    assert grown(pretended, [1, 4], 1, node("b")) == 0
    pretended.nodes, pretended.free = [node("a", cpus=4.0)], {"CPU": 1.0}
    assert grown(pretended, [1, 4], 1, node("b")) == 1


@pytest.mark.usefixtures("often")
def test_a_node_is_no_room_before_others_may_have_come_with_it(
    pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_seconds(monkeypatch, elastic, SETTLED_S=1e9)
    pretended.nodes = [node("a")]
    assert grown(pretended, [1, 2], 1, node("b")) == 0
    pretended.nodes = [{"an odd": "node"}]
    assert grown(pretended, [1, 2], 1, node("b")) == 0


def test_this_machine_is_not_watched(pretended: PretendedRay) -> None:
    with elastic.resizing(
        config_of(trainer__num_workers=1).trainer, NEED, Attempt(1), lambda _: None, Cluster(local=True)
    ):
        assert not [thread for thread in threading.enumerate() if thread.name == "rayrec-elastic.resizing"]


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("workers", [2, [1, 2]])
def test_a_node_that_ray_takes_away_is_left_at_once(pretended: PretendedRay, workers: Any) -> None:
    pretended.nodes, asked = [node("abcdefghij"), node("other")], []  # type: ignore[var-annotated]
    with elastic.resizing(
        config_of(trainer__num_workers=workers).trainer,
        NEED,
        Attempt(2, {"abcdefghij"}),
        asked.append,
        Cluster(local=False),
    ):
        pretended.draining = {"other": 0}
        look_more(pretended)
        assert asked == [], "the run is not on that node"
        pretended.draining = {"abcdefghij": 1000}
        look_more(pretended)
    assert asked == ["Ray removes node abcdefgh"]


def test_prometheus_sees_the_last_figures(pretended: PretendedRay) -> None:
    exported = ExportedMetrics("small", batch_size=64)
    for record in (
        {"kind": "begin", "attempt": 3, "world_size": 2},
        {"kind": "begin", "attempt": 5, "world_size": 4},
        {"kind": "train", "step": 7, "epoch": 1, "samples_per_second": 32.0, "loss": 0.5, "ne": None, "auc": 0.75},
        {"kind": "eval", "step": 7, "ne": 0.8, "auc": None},
        {"kind": "event", "event": "checkpoint", "time": 17.5},
        {"kind": "event", "event": "hang", "time": 99.0},
    ):
        exported(record)
    assert pretended.gauges == {
        f"rayrec_{name}": (value, "small")
        for name, value in {
            "workers": 4.0,
            "restarts": 2.0,
            "step": 7.0,
            "epoch": 2.0,
            "step_seconds": 2.0,
            "samples_per_second": 32.0,
            "loss": 0.5,
            "auc": 0.75,
            "eval_ne": 0.8,
            "checkpoint_time_seconds": 17.5,
        }.items()
    }
    assert pretended.gauges.keys() < GAUGES.keys()
    exported({"kind": "train", "step": 8, "epoch": 1, "samples_per_second": 0.0, "data_wait_fraction": 1.0})
    assert pretended.gauges["rayrec_step_seconds"][0] == 2.0 and pretended.gauges["rayrec_data_wait_fraction"][0] == 1.0
    names = ("rows_used", "rows", "own_share", "full_share", "admitted", "waiting", "refused", "evicted", "expired")
    figures = {name: float(number) for number, name in enumerate(names)}
    exported({"kind": "train", "step": 9, "epoch": 1, "samples_per_second": 0.0, "dynamic_ids": {"user": figures}})
    told = {name: value for name, (value, run) in pretended.gauges.items() if name.startswith("user/")}
    assert told == {f"user/rayrec_ids_{name}": value for name, value in figures.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("pretended"), rows=64)


class Run:
    """A run on the pretended Ray, whose trainer does as it is told instead of training."""

    def __init__(self, folder: Path, out: Path, **trainer: Any) -> None:
        raw = raw_config(folder, storage__path=str(out))
        raw["trainer"] |= {"num_workers": 2, "use_gpu": False, **trainer}
        self.job = make_job(raw)
        self.job.files.create()
        self.display, self.lines = shown()
        self.recorder = recorder_of(self.job.folder, self.display)
        self.trainers: list[Any] = []

    def __call__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[Mailbox], object]) -> dict[str, Any]:
        def fit(trainer: Any) -> None:
            self.trainers.append(trainer)
            self.noted = [path.name for path in self.job.files.ray_state.glob("*")]
            self.health_s = os.environ["RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S"]
            act(trainer.train_loop_config["log"].target)

        monkeypatch.setattr(TorchTrainer, "fit", fit)
        try:
            return run_job(self.job, self.recorder.state, self.recorder, self.display, previous_attempts=4)
        finally:
            self.recorder.close()


def ends_well(box: Mailbox) -> None:
    box.begin(leader=True)
    box.put({"kind": "begin", "resumed_step": None, "world_size": 2})
    box.put({"kind": "done", "outcome": {"steps": 3}})


def test_a_run_on_ray_asks_for_its_workers_and_hears_their_outcome(
    pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    run = Run(folder, tmp_path, max_failures=7, hang_s=99.5)
    assert run(monkeypatch, ends_well) == {"steps": 3}
    ((actor, options),) = pretended.actors
    assert (options["num_cpus"], options["max_restarts"], options["max_task_retries"]) == (0, -1, -1)
    assert options["scheduling_strategy"].node_id == "0" * 56 and options["scheduling_strategy"].soft is False
    assert pretended.killed == [actor] and run.recorder.state.attempt == 5
    assert pretended.gauges["rayrec_workers"] == (2.0, "small")
    assert run.lines() == ["Starting 2 workers (1 CPU each) on the Ray …"]
    (made,) = run.trainers
    assert made.train_loop_per_worker is start_worker
    handed = cloudpickle.loads(made.train_loop_config["job"])
    assert handed.config == run.job.config and handed.train.rows == 64
    scaling, failures = made.scaling_config, made.run_config.failure_config
    assert (scaling.num_workers, scaling.use_gpu, scaling.resources_per_worker) == (2, False, {"CPU": 1.0})
    assert (scaling.accelerator_type, scaling.label_selector, scaling.placement_strategy) == (None, None, "PACK")
    assert scaling.elastic_resize_monitor_interval_s == elastic.NEVER_S
    assert (made.backend_config.backend, made.backend_config.timeout_s) == ("gloo", 160)
    assert (failures.max_failures, failures.controller_failure_limit) == (-1, -1)
    assert (made.run_config.name, made.run_config.storage_path) == ("small", str(run.job.files.ray_state))
    ((variable, held_s),) = made.run_config.worker_runtime_env["env_vars"].items()
    assert f'"{variable}"' in inspect.getsource(default_cluster_autoscaler_v2), "Ray reads it"
    assert 10 < float(held_s) < 60, "live reads renew their request every 10 s"
    assert (run.health_s, run.noted) == ("99.5", [])
    assert not run.job.files.ray_state.exists() and "RAY_TRAIN_WORKER_HEALTH_CHECK_TIMEOUT_S" not in os.environ


def test_the_nodes_that_the_config_selects_are_asked_for(
    pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    pretended.resources = {"CPU": 8.0, "GPU": 4.0, "memory": 8e9, "accelerator_type:H100": 1.0}
    labels = {"region": "!in(a, b)"}
    run = Run(
        folder,
        tmp_path,
        use_gpu="auto",
        resources={
            "accelerator_type": "H100", "memory": "3GB", "label_selector": labels, "placement_strategy": "STRICT_PACK",
        },
    )  # fmt: skip
    run(monkeypatch, ends_well)
    scaling = run.trainers[0].scaling_config
    assert (scaling.accelerator_type, scaling.label_selector) == ("H100", labels)
    assert (scaling.placement_strategy, scaling.use_gpu) == ("STRICT_PACK", True)
    worker = {"CPU": 1.0, "GPU": 1.0, "memory": 3e9, "accelerator_type:H100": 0.001}
    assert scaling._resources_per_worker_not_none == worker
    assert run.lines() == [
        "Starting 2 workers (1 GPU, 3 GB of memory, accelerator H100, label region=!in(a, b) each) on the Ray …"
    ]


def test_an_elastic_run_asks_for_as_many_workers_as_there_is_room_for(
    pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    pretended.resources = {"CPU": 1.0, "GPU": 4.0}
    account = with_account(pretended, Account())
    run = Run(folder, tmp_path, num_workers=[1, 4], use_gpu="auto", cpus_per_worker=0.5)
    run.job = replace(run.job, config=with_reads_on_ray(run.job))
    run.job.files.ray_state.mkdir()
    (run.job.files.ray_state / elastic.REQUEST).write_text("train-killed")
    (run.job.files.ray_state / "left").touch()
    run(monkeypatch, ends_well)
    (made,) = run.trainers
    assert made.scaling_config.num_workers == (1, 4) and made.scaling_config.use_gpu is True
    assert made.scaling_config.resources_per_worker == {"CPU": 0.5, "GPU": 1.0}
    assert made.backend_config.backend == "nccl"
    assert made.run_config.failure_config.controller_failure_limit == -1
    assert account.cancelled == ["train-killed"] and run.noted == [elastic.REQUEST]
    assert cloudpickle.loads(made.train_loop_config["job"]).config.data.read.cpus_per_read == 0.0
    assert run.lines() == ["Starting 1 to 4 workers (1 GPU each) on the Ray …"]


def test_a_machine_with_one_gpu_trains_on_it_and_says_so(
    pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    pretended.up, pretended.resources = False, {"CPU": 4.0, "GPU": 1.0}
    run = Run(folder, tmp_path, use_gpu="auto")
    run(monkeypatch, ends_well)
    (made,) = run.trainers
    assert (made.scaling_config.num_workers, made.scaling_config.use_gpu) == (1, True)
    assert cloudpickle.loads(made.train_loop_config["job"]).config.trainer.num_workers == 1
    assert run.lines() == [
        "trainer.num_workers=2 but this machine has only 1 GPU: using 1 worker. Set trainer.use_gpu=false to run 2 CPU "
        "workers.",
        "Starting 1 workers (1 GPU each) on a local Ray …",
    ]


def with_reads_on_ray(job: Any) -> Any:
    read = job.config.data.read.model_copy(update={"reader": "ray", "cpus_per_read": 0.5})
    return job.config.model_copy(update={"data": job.config.data.model_copy(update={"read": read})})


def raising(error: BaseException, *records: Record) -> Callable[[Mailbox], None]:
    def act(box: Mailbox) -> None:
        for record in records:
            box.put(record)
        raise error

    return act


LOST = RayActorError(None, "The actor died because its node was lost. More")


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (raising(LOST), "Ray Train's controller was lost: The actor died because its node was lost. More"),
        (raising(WorkerGroupError("x", {1: LOST})), "worker 1 was lost: The actor died because its node was lost"),
        (raising(ControllerError(OSError("no room\nat all"))), "Ray Train gave up: no room"),
        (raising(WorkerGroupError("x", {0: OSError()}), {"kind": "fatal", "rank": 0, "error": "a label"}), "a label"),
        (
            lambda box: box.put({"kind": "progress", "step": 8, "epoch": 0}),
            "Workers exited at step 8 without ",
        ),
    ],
)
def test_a_run_on_ray_that_ends_otherwise_says_why(
    pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path, act: Any, text: str
) -> None:
    run = Run(folder, tmp_path)
    with pytest.raises(TrainError) as caught:
        run(monkeypatch, act)
    assert str(caught.value).startswith(text) and len(pretended.killed) == 1
    assert not isinstance(caught.value, Interrupted)


def test_a_run_on_ray_that_was_stopped_is_interrupted(
    pretended: PretendedRay, monkeypatch: pytest.MonkeyPatch, folder: Path, tmp_path: Path
) -> None:
    run = Run(folder, tmp_path, grace_s=50)

    def stops(box: Mailbox) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        until = time.monotonic() + 120
        while not box.stop_requested() and time.monotonic() < until:
            time.sleep(0.005)
        box.put({"kind": "stopped", "message": "stopped at step 3"})
        raise WorkerGroupError("x", {0: OSError()})

    with pytest.raises(Interrupted, match=r"^stopped at step 3$") as caught:
        run(monkeypatch, stops)
    assert caught.value.signal == signal.SIGTERM
    assert run.lines()[-1] == "Stopping: saving a final checkpoint (up to 50 s). Press Ctrl-C again to exit now."
    for error in (KeyboardInterrupt(), SystemExit()):
        with pytest.raises(Interrupted, match=r"^interrupted$"):
            Run(folder, tmp_path)(monkeypatch, raising(error))


class Context:
    """Of a Ray Train worker."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def get_local_world_size(self) -> int:
        return 10_000

    def get_world_rank(self) -> int:
        return self.group.rank()

    def get_world_size(self) -> int:
        return self.group.size()


def works(group: dist.ProcessGroup, job: Any) -> tuple[list[Record], int]:
    """What a worker that Ray Train starts tells, and the threads it computes with."""
    box, before = Mailbox(), torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        for place, name, pretends in (
            (ray.train, "get_context", lambda: Context(group)),
            (ray.train.torch, "get_device", lambda: torch.device("cpu")),
            (ray, "get", lambda answer, timeout: answer),
            (ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "the node")),
            (ray.util, "get_node_ip_address", lambda: "10.0.0.7"),
        ):
            patch.setattr(place, name, pretends)
        start_worker({"job": cloudpickle.dumps(job), "log": Actor(box)})
    threads = torch.get_num_threads()
    torch.set_num_threads(before)
    return box.take(), threads


def test_a_worker_trains_in_the_group_that_ray_has_made(folder: Path, tmp_path: Path) -> None:
    raw = raw_config(folder, storage__path=str(tmp_path), trainer__epochs=1, trainer__threads_per_worker="auto")
    (first, threads), (second, _) = on_ranks(2, works, make_job(raw))
    assert threads == 1, "the machine's, shared by many"
    assert [first[0]["kind"], first[-1]["kind"], second] == ["begin", "done", []]
    outcome = first[-1]["outcome"]
    assert (outcome["world_size"], outcome["train"]["samples"], outcome["eval"]["samples"]) == (2, 64, 301)
    (host,) = first[1]["plan"]["planned_for"]["hosts"]
    assert (host["name"], host["ranks"], host["gpu"]) == ("10.0.0.7", 2, None)
