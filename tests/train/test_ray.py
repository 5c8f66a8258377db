"""Runs on real Ray workers: two ranks, a worker killed in mid-run, failures that must not be tried again."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
import yaml
from ray.exceptions import RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from rich.console import Console
from torch import nn

from rayrec.checkpoint import CheckpointStore
from rayrec.models import DLRM, Batch
from rayrec.train import Display, ResourceError, Trainer, TrainError, evaluate_run, parse_config
from rayrec.train.driver import room
from rayrec.train.driver.cluster import Cluster, connected, nodes_without
from rayrec.train.driver.elastic import note_request, release_request
from rayrec.train.driver.failures import SHUTDOWN_TIMEOUT, failure_reporter
from rayrec.train.driver.resources import Demand
from rayrec.train.driver.trackers import GAUGES
from rayrec.train.run.log import Mailbox
from tests.ranks import on_ranks
from tests.train.pretended_ray import set_seconds
from tests.train.row_log import Noted, assert_every_row_once, noted, with_row_ids
from tests.train.small import config_of, fit_on_rank, flat, raw_config, recorder_of, run_folder, write_all

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]

QUIET = {
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_TRAIN_METRICS_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S": "1",
    "PYTHONWARNINGS": "ignore",
}


@pytest.fixture(scope="module", autouse=True)
def local_ray() -> Iterator[None]:
    """One Ray of 4 CPUs for all tests of this file."""
    before = {name: os.environ.get(name) for name in QUIET}
    os.environ.update(QUIET)
    if ray.is_initialized():
        ray.shutdown()
    ray.init(
        address="local",
        num_cpus=4,
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
        _system_config={"metrics_report_interval_ms": 1000},
    )
    yield
    ray.shutdown()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})


class Seen:
    """A trainer with what it shows."""

    def __init__(self, folder: Path, factory: Any = None, **changes: Any) -> None:
        self.text = io.StringIO()
        changes = {"trainer__num_workers": 2, "data__read": {"reader": "ray", "cpus_per_read": 0.25}, **changes}
        display = Display(Console(file=self.text, width=200))
        self.trainer = Trainer(parse_config(raw_config(folder, **changes)), factory=factory, display=display)
        self.files = run_folder(self.trainer.folder.path)

    @property
    def shown(self) -> str:
        return self.text.getvalue()

    def events(self) -> list[str]:
        return [record["event"] for record in self.files.read_metrics() if record["kind"] == "event"]


class Slow(nn.Module):
    """A model that takes its time; on rank 1 it fails in one of its steps, if told to."""

    def __init__(self, inner: nn.Module, seconds: float, fail_at: int = -1) -> None:
        super().__init__()
        self.inner = inner
        self.seconds, self.fail_at, self.steps = seconds, fail_at, 0

    def forward(self, batch: Batch) -> Any:
        import torch.distributed as dist

        time.sleep(self.seconds if self.training else 0.0)
        self.steps += 1
        if self.steps == self.fail_at and dist.get_rank() == 1:
            raise KeyError("no such layer on rank 1")
        return self.inner(batch)


def scraped(wanted: set[str], seconds: float) -> dict[str, str]:
    """Metric → its lines, as Prometheus reads them of this Ray's only node, once all that are wanted are there."""
    (node,) = ray.nodes()
    until, found = time.monotonic() + seconds, dict[str, str]()
    while time.monotonic() < until and not (found and wanted <= set(found)):
        time.sleep(0.5)
        with contextlib.suppress(OSError):
            url = f"http://127.0.0.1:{node['MetricsExportPort']}/metrics"
            lines = urllib.request.urlopen(url, timeout=10).read().decode().splitlines()
            found = {line.partition("{")[0]: line for line in lines if not line.startswith("#")}
    return found


# A driver whose process lives until it is told to end: its metrics are gone with it.
DRIVER = """
import sys
from rayrec.train import Trainer
from rayrec.train.config.file import load_config

Trainer(load_config(sys.argv[1])).fit()
sys.stdin.readline()
"""


@pytest.mark.long(minutes=4)
def test_prometheus_finds_all_that_the_dashboard_draws(tmp_path: Path) -> None:
    """The driver joins a Ray whose agent answers: one that Ray waits for longer than 30 s is given up for good."""
    write_all(tmp_path)
    changes = {"trainer__num_workers": 2, "trainer__epochs": 1, "trainer__log_every": 2}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(raw_config(tmp_path, **changes)))
    board = json.loads((ROOT / "deploy" / "grafana-dashboard.json").read_text())
    words = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    words += [variable["query"] for variable in board["templating"]["list"]]
    wanted = {name for text in words for name in re.findall(r"\bray_\w+", text)}
    assert {f"ray_{name}" for name in GAUGES} <= wanted, "what is exported is drawn"
    assert scraped(set(), 200), "Ray's agent does not answer"
    environment = {**os.environ, "RAY_ADDRESS": ray.get_runtime_context().gcs_address, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", DRIVER, str(tmp_path / "config.yaml")]
    driver = subprocess.Popen(command, env=environment, cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    try:
        found = scraped(wanted, 200)
    finally:
        driver.communicate(b"end\n")
    assert driver.returncode == 0
    assert wanted <= set(found), wanted - set(found)
    assert 'run="small"' in found["ray_rayrec_loss"]
    assert float(found["ray_rayrec_workers"].rpartition(" ")[2]) == 2


def workers_of_this_process() -> list[int]:
    """Process ids of Ray Train's workers whose Ray this process started."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                named = (entry / "cmdline").read_bytes().startswith(b"ray::RayTrainWorker")
                if named and parent(parent(int(entry.name))) == os.getpid():
                    found.append(int(entry.name))
            except OSError:
                continue
    return sorted(found)


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def signal_a_worker_at(seen: Seen, step: int, killed: list[int], number: int = signal.SIGKILL) -> None:
    until = time.monotonic() + 400
    while time.monotonic() < until:
        if any(record.get("step", 0) >= step for record in seen.files.read_metrics()):
            killed.append(workers_of_this_process()[-1])
            os.kill(killed[0], number)
            return
        time.sleep(0.05)


def test_a_killed_worker_is_replaced_and_the_run_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    write_all(tmp_path)
    ids = with_row_ids(tmp_path, 1000)
    features = {"schema": ids["schema"], "tables": ids["tables"]}
    log = tmp_path / "rows"
    # Ray Data's processes take more time than the run; the frozen worker below is replaced under that reader.
    features |= {"data__read": {"reader": "local"}}
    seen = Seen(tmp_path, factory=lambda **given: Slow(Noted(str(log), {}, **given), 0.05), **features)
    killed: list[int] = []
    killer = threading.Thread(target=signal_a_worker_at, args=(seen, 8, killed))
    killer.start()
    result = seen.trainer.fit()
    killer.join()
    assert killed
    assert result.recoveries == 1
    assert (result.world_size, result.steps, result.epochs, result.train["samples"]) == (2, 32, 2, 2000)
    assert result.eval is not None
    assert result.eval["samples"] == 301
    recovered = [r for r in seen.files.read_metrics() if r["kind"] == "event" and r["event"] == "recovered"]
    assert len(recovered) == 1
    assert recovered[0]["step"] % 6 == 0
    assert "was killed" in recovered[0]["message"]
    assert f"resumed from the checkpoint of step {recovered[0]['step']}" in recovered[0]["message"]
    assert recovered[0]["message"] in seen.shown
    assert {record["attempt"] for record in seen.files.read_metrics()} == {1, 2}
    undisturbed = on_ranks(2, fit_on_rank, raw_config(tmp_path, name="undisturbed", **features))[0]
    assert flat(result.eval) == pytest.approx(flat(undisturbed["eval"]), abs=1e-6)
    by_rank = [noted(log, rank) for rank in range(2)]
    resumed = recovered[0]["step"]
    stands = [lines[:resumed] + lines[len(lines) - (32 - resumed) :] for lines in by_rank]
    assert all(len(lines) >= 32 for lines in by_rank)
    assert_every_row_once([mine + other for mine, other in zip(*stands, strict=True)], 1000, epochs=2)


@pytest.mark.long
def test_a_run_goes_on_with_other_numbers_of_workers_after_its_model_failed(tmp_path: Path) -> None:
    """One worker, then two of which one fails, which ends the run at once, then one with the rows that are left."""
    write_all(tmp_path)
    ids = with_row_ids(tmp_path, 1000)
    features = {"schema": ids["schema"], "tables": ids["tables"]}
    logs = [tmp_path / name for name in ("alone", "failing", "going-on")]

    def model(log: Path, fail_at: int = -1) -> Callable[..., nn.Module]:
        return lambda **given: Slow(Noted(str(log), {}, **given), 0.0, fail_at)

    alone = Seen(tmp_path, model(logs[0]), **features, trainer__num_workers=0, trainer__epochs=1).trainer.fit()
    assert (alone.world_size, alone.steps) == (1, 16)
    seen = Seen(tmp_path, model(logs[1], fail_at=10), **features)
    with pytest.raises(TrainError, match=r"(?s)KeyError: 'no such layer on rank 1'.*checkpoint of step 24 is intact"):
        seen.trainer.fit()
    latest = CheckpointStore(seen.files.checkpoints).latest()
    assert latest is not None
    assert latest.step == 24
    assert {record["attempt"] for record in seen.files.read_metrics()} == {1, 2}, "a launch each, none tried again"
    assert "started again" not in seen.shown and "restarted" not in seen.shown
    assert "resumed" in seen.events() and seen.events()[-1] == "failed"
    last = Seen(tmp_path, model(logs[2]), **features, trainer__num_workers=0)
    result = last.trainer.fit()
    assert (result.steps, result.world_size, result.train["samples"]) == (32, 1, 2000)
    assert last.events()[-1] == "checkpoint"
    two = [mine + other for mine, other in zip(*(noted(logs[1], rank)[:8] for rank in range(2)), strict=True)]
    assert_every_row_once(noted(logs[0], 0) + two + noted(logs[2], 0), 1000, epochs=2)
    assert result.eval is not None
    assert result.eval["samples"] == 301
    assert result.eval["auc"] > 0.8
    quiet = Display(Console(quiet=True))
    scores = evaluate_run(last.files.path, num_workers=2, factory=model(logs[2]), display=quiet)
    assert flat({name: scores[name] for name in result.eval}) == pytest.approx(flat(result.eval))


def test_failures_beyond_the_limit_end_the_run_with_how_often_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    mailbox: Any = ray.remote(num_cpus=0)(Mailbox).remote()
    monkeypatch.setenv(SHUTDOWN_TIMEOUT, "7")
    reporter = failure_reporter(mailbox, max_failures=1)
    monkeypatch.delenv(SHUTDOWN_TIMEOUT)  # the driver's environment is not the controller's
    lost: dict[int, Exception] = {1: RayActorError(), 0: RuntimeError("connection closed")}
    reporter.after_exception(None, lost)
    assert os.environ[SHUTDOWN_TIMEOUT] == "7"
    with pytest.raises(TrainError, match=r"failed 2 times .*trainer\.max_failures=1 is the limit.*: worker 1 was"):
        reporter.after_exception(None, lost)
    first, last = ray.get(mailbox.take.remote())
    assert first["kind"] == "failure" and first["reason"].startswith("worker 1 was lost")
    assert last["kind"] == "fatal" and "trainer.max_failures=1" in last["error"]
    with pytest.raises(TrainError, match=r"^worker 0: RuntimeError: connection closed$"):  # fatal already: not counted
        reporter.after_exception(None, {0: lost[0]})
    ray.kill(mailbox)


def test_a_lost_worker_counts_more_than_errors_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A neighbour's mappings vanish with a killed worker: what a rank then reports need not come again."""
    monkeypatch.delenv(SHUTDOWN_TIMEOUT, raising=False)
    mailbox: Any = ray.remote(num_cpus=0)(Mailbox).remote()
    recorder = recorder_of(tmp_path)

    def hear() -> None:
        for record in ray.get(mailbox.take.remote()):
            recorder(record)

    def report(rank: int) -> None:
        ray.get(mailbox.put.remote({"kind": "fatal", "rank": rank, "error": f"bad row on rank {rank}"}))

    reporter = failure_reporter(mailbox, max_failures=2)
    report(1)
    hear()
    assert recorder.state.fatal == "bad row on rank 1"
    reporter.after_exception(None, {0: RayActorError(), 1: ValueError("bad row on rank 1")})
    report(2)  # of the same group, a little later
    hear()
    assert recorder.state.fatal is None and "worker 0 was lost" in recorder.failures[-1]
    assert ray.get(mailbox.begin.remote(True)) is False  # the next attempt trains

    report(1)  # the error comes again, and without a death it ends the run
    with pytest.raises(TrainError, match="bad row"):
        reporter.after_exception(None, {1: ValueError("bad row on rank 1")})
    hear()
    assert recorder.state.fatal == "bad row on rank 1" and ray.get(mailbox.begin.remote(False)) is True
    with pytest.raises(TrainError, match="worker 1 was lost"):  # it had reported, and then ended itself (`watch.py`)
        reporter.after_exception(None, {1: RayActorError()})

    reporter.after_exception(None, {0: RayActorError(), 1: ValueError("bad row on rank 1")})  # the second failure
    report(1)
    with pytest.raises(TrainError, match=r"max_failures=2"):
        reporter.after_exception(None, {0: RayActorError()})
    hear()
    assert recorder.state.fatal is not None and "failed 3 times" in recorder.state.fatal
    ray.kill(mailbox)


def test_what_a_killed_driver_had_asked_for_is_freed(tmp_path: Path) -> None:
    """Else an elastic run that is started again waits for three minutes on a cluster that is just large enough."""
    from ray.data._internal.cluster_autoscaler.default_autoscaling_coordinator import (
        get_or_create_autoscaling_coordinator,
    )

    account = get_or_create_autoscaling_coordinator()
    asked = {"resources": [{"CPU": 4.0}], "expire_after_s": 180}
    ray.get(account.request_resources.remote(requester_id="train-killed", **asked))
    ray.get(account.request_resources.remote(requester_id="train-again", **asked))
    assert ray.get(account.get_reserved_resources.remote("train-killed"))
    assert not ray.get(account.get_reserved_resources.remote("train-again"))
    release_request(tmp_path)  # nothing is noted
    note_request(tmp_path, "train-killed")
    release_request(tmp_path)
    assert not ray.get(account.get_reserved_resources.remote("train-killed"))
    assert ray.get(account.get_reserved_resources.remote("train-again"))
    ray.get(account.cancel_request.remote("train-again"))


def test_more_cpus_than_ray_has_are_refused_though_runs_wait_without_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_all(tmp_path, rows=50)
    set_seconds(monkeypatch, room, JOINING_S=0.5)
    seen = Seen(tmp_path, trainer__cpus_per_worker=64.0)
    with pytest.raises(ResourceError, match=r"the run needs 128\.25 CPUs .* but the Ray cluster has 4; "):
        seen.trainer.fit()


def test_nodes_that_do_not_see_a_folder(tmp_path: Path) -> None:
    nodes = Cluster(local=False).nodes()
    assert nodes_without(str(tmp_path), nodes, wait_s=0) == []
    assert nodes_without(str(tmp_path / "elsewhere"), nodes, wait_s=0) == nodes
    assert [node.resources["CPU"] for node in nodes] == [4.0] and nodes[0].address and nodes[0].labels


def test_runs_that_wait_keep_their_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the autoscaler reads is one value for the whole cluster."""
    from ray.autoscaler._private.constants import AUTOSCALER_RESOURCE_REQUEST_CHANNEL
    from ray.experimental.internal_kv import _internal_kv_get

    def requested() -> Any:
        return json.loads(_internal_kv_get(AUTOSCALER_RESOURCE_REQUEST_CHANNEL) or b"[]")

    waiting = Demand(num_workers=4, cpus_per_worker=1.0, use_gpu=True, reader_cpus=0.0)
    ready = Demand(num_workers=1, cpus_per_worker=1.0, use_gpu=False, reader_cpus=0.0)
    labelled = config_of(
        trainer__num_workers=1,
        trainer__resources={"label_selector": {"region": "!in(a, b)"}, "placement_strategy": "SPREAD"},
    ).trainer.resources
    with room._requested(waiting, "rayrec-a"):
        mine = requested()
        assert len(mine) == 4
        with room._requested(replace(ready, selection=labelled), "rayrec-b"):
            assert len(requested()) == 5
        assert requested() == mine
    assert requested() == []


@pytest.mark.long
def test_the_only_worker_is_replaced_where_it_is_frozen(tmp_path: Path) -> None:
    """Nobody waits for it, and its own watch is frozen with it."""
    write_all(tmp_path, rows=300)
    frozen: list[int] = []
    seen = Seen(
        tmp_path,
        factory=lambda **given: Slow(DLRM(**given), 0.1),
        trainer__num_workers=1,
        trainer__hang_s=15.0,
        trainer__checkpoint_every=2,
    )
    freezer = threading.Thread(target=signal_a_worker_at, args=(seen, 4, frozen, signal.SIGSTOP))
    freezer.start()
    result = seen.trainer.fit()
    freezer.join()
    assert frozen and result.recoveries == 1
    assert (result.steps, result.train["samples"]) == (10, 600)
    until = time.monotonic() + 120
    while Path(f"/proc/{frozen[0]}").exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not Path(f"/proc/{frozen[0]}").exists(), "the frozen process is left behind"


def test_a_thousand_workers_have_their_places_before_an_elastic_run_asks_again() -> None:
    """Ray Train drops a request for places that are not ready in time, and makes it again. The last test of this file:
    Ray takes a while to free so many places."""
    with connected(elastic=True):
        limit_s = float(os.environ["RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S"])
    places = placement_group([{"CPU": 0.001}] * 1000)
    try:
        assert places.wait(limit_s)
    finally:
        remove_placement_group(places)
