"""What a run decides, each decision by itself and without Ray: resources, growth, stops, positions, plans, texts."""

from __future__ import annotations

import math
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.exceptions import RayActorError

from rayrec.data import Cursor
from rayrec.distributed import EmbOptimType, ParameterSharding, Shard, ShardingPlan, Span
from rayrec.distributed.planner.cost.estimate import Estimate
from rayrec.distributed.planner.cost.terms import Cost
from rayrec.models import Batch
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import Interrupted, ResourceError, TrainConfig, TrainError, parse_config
from rayrec.train.config.difference import value_at
from rayrec.train.config.interval import Interval
from rayrec.train.config.relaunch import _short
from rayrec.train.driver.elastic import REQUEST, note_request, room_for, without_read_reservations
from rayrec.train.driver.failures import failure_reason, line_of, too_often
from rayrec.train.driver.recorder import Lines
from rayrec.train.driver.resources import Demand, Supply, demand_of, refuse_if_short
from rayrec.train.driver.signals import StopSignals, handling, run_in_background
from rayrec.train.errors import describe
from rayrec.train.run.folder import RunFolder
from rayrec.train.run.log import Mailbox, RunState, Waiting, handling_records
from rayrec.train.setup import build
from rayrec.train.setup.groups import Decision, layout_of
from rayrec.train.setup.init_from import ALL, _same_rows
from rayrec.train.terminal import _sizes, host_lines, memory_lines, ranks_text
from rayrec.train.worker.evaluation import Scores, _merged
from rayrec.train.worker.lockstep import Control, Every, Purpose, StepInput
from rayrec.train.worker.micro_batches import micro_batch_of
from rayrec.train.worker.position import START
from rayrec.train.worker.session import Session, session_alone
from rayrec.train.worker.streams import SkippedRows
from rayrec.train.worker.watch import EXIT_UNLIKE, POLL_S, TURN_S, CodeLocation, Watch, location_of
from rayrec.train.worker.window import Window
from tests.train.small import Silent, raw_config

CPU, NOWHERE = torch.device("cpu"), Path("/nowhere")


def config_of(**changes: Any) -> TrainConfig:
    return parse_config(raw_config(NOWHERE, **changes))


def test_a_supply_covers_what_it_has_and_no_more() -> None:
    need = Demand(num_workers=2, cpus_per_worker=1.5, use_gpu=True, reader_cpus=1.0)
    assert (need.cpus, need.gpus, need.per_worker) == (4.0, 2, {"CPU": 1.5, "GPU": 1.0})
    assert Supply(cpus=4, gpus=2).covers(need) and Supply(cpus=4 - 1e-7, gpus=2).covers(need)
    assert not Supply(cpus=3.9, gpus=2).covers(need) and not Supply(cpus=4, gpus=1).covers(need)
    assert replace(need, use_gpu=False).gpus == 0 and replace(need, use_gpu=False).per_worker == {"CPU": 1.5}


def test_readers_take_what_a_read_takes_and_nothing_of_an_elastic_run() -> None:
    def reader_cpus(workers: int | list[int], cpus_per_read: float, reader: str = "ray") -> float:
        read = {"reader": reader, "cpus_per_read": cpus_per_read}
        return demand_of(config_of(trainer__num_workers=workers, data__read=read), Supply(cpus=8, gpus=0)).reader_cpus

    assert [reader_cpus(2, cpus) for cpus in (0.0, 0.25, 2.0)] == [0.25, 0.25, 2.0]
    assert reader_cpus(2, 2.0, reader="local") == reader_cpus([1, 2], 2.0) == 0.0
    assert demand_of(config_of(trainer__num_workers=2), Supply(cpus=8, gpus=2)).reader_cpus == 0.0  # reads by itself
    on_ray = config_of(trainer__num_workers=2, data__read={"reader": "ray", "cpus_per_read": 0.5})
    found = demand_of(on_ray, Supply(cpus=8, gpus=2))
    assert (found.reader_cpus, found.use_gpu, found.num_workers) == (0.5, True, 2)
    assert without_read_reservations(on_ray).data.read.cpus_per_read == 0.0
    assert not demand_of(config_of(trainer__num_workers=0), Supply(cpus=1, gpus=0)).use_gpu


@pytest.mark.parametrize(
    ("need", "supply", "text"),
    [
        (
            (4, 1.0, False, 0.5),
            (2.5, 0),
            "the run needs 4.5 CPUs (4 workers × 1 and 0.5 for reading), but x has 2.5; lower trainer.num_workers to "
            "2, or lower trainer.cpus_per_worker to at most 0.5, or use a larger cluster",
        ),
        (
            (2, 2.0, False, 0.0),
            (1.0, 0),
            "the run needs 4 CPUs (2 workers × 2), but x has 1; lower trainer.cpus_per_worker to at most 0.5, or use a "
            "larger cluster",
        ),
        (
            (1, 1.0, False, 1.0),
            (1.0, 0),
            "the run needs 2 CPUs (1 workers × 1 and 1 for reading), but x has 1; use a larger cluster",
        ),
        (
            (2, 2.0, True, 0.0),
            (1.0, 1.0),
            "trainer.num_workers=2 with use_gpu needs 2 GPUs (one per worker), but x has 1; lower trainer.num_workers "
            "to 1, or set trainer.use_gpu=false",
        ),
    ],
)
def test_a_refusal_says_what_would_fit(need: Any, supply: Any, text: str) -> None:
    workers, cpus, gpu, reading = need
    wanted = Demand(num_workers=workers, cpus_per_worker=cpus, use_gpu=gpu, reader_cpus=reading)
    with pytest.raises(ResourceError) as caught:
        refuse_if_short(wanted, Supply(cpus=supply[0], gpus=supply[1]), "x has")
    assert str(caught.value) == text


def test_failures_are_told_in_a_line() -> None:
    assert [line_of(text) for text in ("", " \n\n", "\n  first \nsecond")] == ["no reason given"] * 2 + ["first"]
    assert line_of("a" * 200) == "a" * 200 and line_of("a" * 201) == "a" * 199 + "…"
    assert too_often(1, 0, "why").startswith("The workers failed once without")
    gone = RayActorError(None, "The actor died because its node was lost. More words")
    code = RayActorError(None, "Worker exits: connection error code 2. End of file")
    late = RuntimeError("no answer")
    late.health_check_failure = gone  # type: ignore[attr-defined]
    assert failure_reason({3: late, 1: gone, 0: ValueError("peer")}) == (
        "workers 1, 3 were lost: The actor died because its node was lost"
    )
    assert failure_reason({0: code}) == "worker 0 was lost: its process was killed (SIGKILL, or out of memory)"
    assert failure_reason({0: RayActorError(None, "odd")}) == "worker 0 was lost: odd"
    assert failure_reason({2: OSError("b"), 1: KeyError("a")}) == "worker 1: KeyError: 'a', worker 2: OSError: b"
    assert (describe(ValueError("x")), describe(ValueError()), describe(OSError("x"))) == (
        "x",
        "ValueError",
        "OSError: x",
    )


def test_a_stop_is_asked_for_once() -> None:
    asked = threading.Semaphore(0)
    signals = StopSignals(asked.release, grace_s=1000)
    assert signals.reason_to_exit is None and signals.interrupted("x").signal == signal.SIGINT
    signals(signal.SIGTERM)
    assert asked.acquire(timeout=10) and signals.reason_to_exit is None and signals.received == signal.SIGTERM
    signals(signal.SIGINT)
    assert signals.reason_to_exit == "Exited on the second interrupt; no final checkpoint was saved."
    assert signals.interrupted("x").signal == signal.SIGTERM
    assert not asked.acquire(blocking=False)
    assert Interrupted("x").signal == 2


def test_handlers_are_put_back_and_what_was_raised_is_raised_here() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    heard = StopSignals(lambda: None, grace_s=1000)
    with pytest.raises(KeyError), handling(heard):
        assert signal.getsignal(signal.SIGINT) is heard and signal.getsignal(signal.SIGTERM) is heard
        raise KeyError
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    done: list[int] = []
    run_in_background(lambda: done.append(1), heard)
    assert done == [1]
    with pytest.raises(ZeroDivisionError):
        run_in_background(lambda: 1 // 0, heard)
    threads: list[threading.Thread] = []
    run_in_background(lambda: threads.append(threading.current_thread()), heard)
    StopSignals(lambda: threads.append(threading.current_thread()), grace_s=1000)(signal.SIGINT)
    with handling_records(lambda: [{}], lambda _: threads.append(threading.current_thread()), every_s=0.001):
        while len(threads) < 3:
            time.sleep(0.001)
    assert all(thread.daemon for thread in threads[:3]), "none of them keeps a process whose run has ended"
    beside = threading.Thread(target=lambda: handling(heard).__enter__())
    beside.start()
    beside.join()
    assert signal.getsignal(signal.SIGINT) == before[0]


def test_requests_are_noted_under_their_name(tmp_path: Path) -> None:
    note_request(tmp_path / "deep" / "er", "train-abc")
    note_request(tmp_path / "deep" / "er", "train-abc")
    assert (tmp_path / "deep" / "er" / REQUEST).read_text() == "train-abc"
    assert room_for({"CPU": 0.1}, [{"CPU": 0.3}, {}], 9) == 3


@pytest.mark.parametrize(
    ("wanted", "elastic", "found"), [("auto", False, 1), (3, False, 3), (4, True, 3), (2, True, 2)]
)
def test_groups_are_those_of_the_config_or_of_the_plan(wanted: Any, elastic: bool, found: int) -> None:
    workers: Any = [1, 6] if elastic else 6
    config = config_of(trainer__num_workers=workers, sharding={"replicas": wanted})
    assert layout_of(config, 6).replicas == found
    if wanted == "auto":
        for ranks, size in [(1, 1), (2, 2), (4, 6), (3, 3)]:
            assert layout_of(config, 6, on_ranks(ranks)).group_size == size


def on_ranks(count: int, dense: bool = False) -> ShardingPlan:
    """A table of 12 rows a rank, 8 wide, by rows; the plain way to say a plan."""
    shards = tuple(Shard(table="user", rows=Span(12 * r, 12 * r + 12), cols=Span(0, 8), rank=r) for r in range(count))
    kernel = "dense" if dense else "fused"
    one = ParameterSharding(sharding_type="row_wise", compute_kernel=kernel, shards=shards, device="cpu")
    return ShardingPlan({"bags": {"user": one}})


def test_several_groups_are_told_in_the_plan() -> None:
    import numpy as np

    from rayrec.distributed.replicas.layout import GroupLayout

    zeros = Estimate(
        cost_RT=np.zeros((2, len(Cost._fields))),
        storage_RT=np.zeros((2, 5)),
        collectives_s=0.0,
        routing_s=0.0,
        reserve_R=np.zeros(2),
    )
    two = Decision(layout=GroupLayout(4, 2), plan=on_ranks(2), estimate=zeros, sync_s=0.5, sync_bytes=7.0)
    assert two.plan_entry(3) == {
        "replicas": {"groups": 2, "workers": 2, "sync_every": 3, "sync_s": 0.5, "sync_bytes": 7.0}
    }
    one = Decision(layout=GroupLayout(2, 2), plan=on_ranks(2), estimate=zeros)
    assert (one.plan_entry(3), one.sync_s, one.sync_bytes) == ({}, 0.0, 0.0)
    costs = np.arange(2.0 * len(Cost._fields)).reshape(2, -1)
    found = build.plan_time(replace(zeros, cost_RT=costs, collectives_s=1.0, routing_s=0.5))
    for rank, line in enumerate(found):
        cost = Cost(*costs[rank])
        assert line == {
            "rank": rank,
            "routing_s": 1.5,
            "ids_s": cost.input_intra + cost.input_inter,
            "lookup_s": cost.lookup,
            "vectors_s": cost.output_intra + cost.output_inter,
            "gradients_s": cost.gradient_intra + cost.gradient_inter,
            "update_s": cost.backward + cost.host,
        }
    assert build.plan_time(None) == []


@pytest.mark.parametrize(
    ("dense", "sparse", "kernel", "data_type", "state", "dense_bytes"),
    [
        ("adam", "rowwise_adagrad", "fused", "fp32", 12 * 4, 4 * 5 * 4),
        ("sgd", "adagrad", "fused", "fp32", 12 * 8 * 4, 4 * 5 * 2),
        ("adagrad", "sgd", "fused", "fp32", 0, 4 * 5 * 3),
        ("adamw", "sgd", "dense", "fp32", 12 * 8 * 4 * 3, 4 * 5 * 4),
        ("sgd", "sgd", "dense", "fp16", 12 * 8 * 2, 4 * 5 * 2),
    ],
)
def test_bytes_of_a_plan_by_hand(
    dense: str, sparse: str, kernel: str, data_type: str, state: int, dense_bytes: int
) -> None:
    """Two ranks of three hold 12 of 24 rows of 8 numbers; the dense part has 5."""
    raw = raw_config(NOWHERE)
    raw["tables"][0] |= {"rows": 24, "data_type": data_type}
    raw["optimizers"] = {"dense": {"kind": dense, "lr": 0.1}, "sparse": {"kind": sparse, "lr": 0.1}}
    found = build.plan_memory(on_ranks(2, kernel == "dense"), parse_config(raw), 3, 5)
    weights = 12 * 8 * (4 if data_type == "fp32" else 2)
    assert found == [
        {"rank": rank, "weights_bytes": w, "optimizer_bytes": s, "dense_bytes": dense_bytes}
        for rank, (w, s) in enumerate([(weights, state), (weights, state), (0, 0)])
    ]


def test_the_config_becomes_what_planner_and_sharders_take() -> None:
    given = {"pooling_factor": 3.0, "sharding_types": ["row_wise"], "cache_load_factor": 0.3, "min_partition": 4}
    config = config_of(sharding={"constraints": {"tag": given, "user": {}}})
    found = build.constraints(config)
    assert found.keys() == {"tag", "user"}
    tag, user = found["tag"], found["user"]
    assert tag.cache_params is not None and tag.cache_params.load_factor == 0.3
    assert (tag.pooling_factors, tag.sharding_types, tag.min_partition) == ([3.0], ["row_wise"], 4)
    assert (user.pooling_factors, user.cache_params, user.sharding_types) == (None, None, None)
    params = build.fused_params(config.optimizers.sparse)
    assert params["optimizer"] is EmbOptimType.EXACT_ROWWISE_ADAGRAD and params["learning_rate"] == 0.1
    for gradients, scale in [("fp32", 1.0), ("fp16", 64.0), ("bf16", 64.0)]:
        wire = {"vectors": "fp16", "gradients": gradients, "gradient_scale": 64.0}
        codec = build._codec(config_of(sharding={"wire": wire}))
        assert codec.backward_scale == scale
    assert [table.pooling.name for table in build.tables(config)] == ["SUM", "SUM", "MEAN"]
    as_given, *_ = build.tables(config_of(tables=[{**config.tables[0].model_dump(), "init": 1.5}, *config.tables[1:]]))
    ends = [(one.get_weight_init_min(), one.get_weight_init_max()) for one in (as_given, build.tables(config)[0])]
    by_rows = config.tables[0].rows ** -0.5
    assert ends == [(-1.5, 1.5), (pytest.approx(-by_rows), pytest.approx(by_rows))]
    kinds = {"sgd": 0, "adam": 2, "adamw": 2, "adagrad": 1}
    assert kinds == build.STATE_PER_ELEMENT and build.DENSE_OPTIMIZERS.keys() == kinds.keys()
    for kind, count in kinds.items():
        parameter = torch.nn.Parameter(torch.ones(3))
        optimizer = build.DENSE_OPTIMIZERS[kind]([parameter], lr=0.1)
        parameter.sum().backward()
        optimizer.step()
        assert sum(s.shape == (3,) for s in optimizer.state[parameter].values() if isinstance(s, torch.Tensor)) == count


def test_a_given_plan_is_checked_against_workers_and_tables(tmp_path: Path) -> None:
    def refused(text: str, world: int = 2, replicas: int = 1, rows: int = 24) -> None:
        raw = raw_config(NOWHERE, sharding={"plan": str(tmp_path / "plan.json")})
        raw["tables"] = [{"name": "user", "rows": rows, "dim": 8, "features": ["user", "item", "tags"]}]
        config = parse_config(raw)
        if not text:
            assert build.given_plan(config, world, replicas) is not None
            return
        with pytest.raises(TrainError, match=text):
            build.given_plan(config, world, replicas)

    assert build.given_plan(config_of(), 1) is None
    refused("cannot be read: No such file")
    (tmp_path / "plan.json").write_text(on_ranks(2).to_json())
    refused("")
    refused("", world=3, replicas=2)
    refused(r"places shards on 2 ranks, but trainer\.num_workers is 1; raise it, .*--world 1`", world=1)
    refused(r"on 2 ranks, but each of 3 groups \(sharding\.replicas\) has 1 of the 3 workers", world=1, replicas=3)
    refused(r"table 'user' is \(25, 8\) \(rows, dim\) in the config, but .* has it as \(24, 8\)", rows=25)
    (tmp_path / "plan.json").write_text(on_ranks(1).to_json().replace('"user"', '"other"'))
    refused("does not have it; make a new plan with `rayrec plan`", world=0)


FACTS = {"mapping": "hash", "seed": 1}
WORDS = {"mapping": "vocabulary", "hash_law": 1, "oov_rows": 2, "vocabulary_size": 5, "vocabulary_checksum": "x"}


def test_rows_that_mean_other_ids_are_refused_for_a_warm_start() -> None:
    assert _same_rows("w", FACTS, FACTS, None) == ALL
    assert _same_rows("w", WORDS, WORDS, None) == ALL
    assert _same_rows("w", FACTS, {**FACTS, "id_type": "text"}, None) == ALL, "an earlier checkpoint has none"
    with pytest.raises(TrainError, match="id_type was integer and is text"):
        _same_rows("w", {**FACTS, "id_type": "integer"}, {**FACTS, "id_type": "text"}, None)
    with pytest.raises(
        TrainError, match="w: its ids would map to other rows: seed was 1 and is 2; use the mapping of that run"
    ):
        _same_rows("w", FACTS, {**FACTS, "seed": 2}, None)
    with pytest.raises(TrainError, match="mapping was hash and is vocabulary"):
        _same_rows("w", {"mapping": "hash"}, {"mapping": "vocabulary"}, None)


def test_the_run_folder_of_a_uri_stands_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    far = RunFolder.at("s3://b/runs/?region=x", "a")
    assert far.path.is_relative_to(tmp_path / "rayrec" / "runs") and far.path.name == "a"
    assert far.remote == "s3://b/runs/a?region=x" and far.checkpoints == "s3://b/runs/a/checkpoints?region=x"
    assert RunFolder.at("s3://b/runs", "a").path != far.path == RunFolder.at("s3://b/runs/?region=x", "a").path
    near = RunFolder.at(str(tmp_path), "b")
    assert (near.path, near.remote, near.checkpoints) == (tmp_path / "b", None, str(tmp_path / "b" / "checkpoints"))
    assert near.set_aside() is None
    aside = []
    for _ in range(3):  # within a second or two: names differ all the same
        near.create()
        assert list(near.path.iterdir()) == []
        assert near.set_aside() is None, "an empty folder holds nothing to keep"
        near.metrics.write_text("")
        aside.append(near.set_aside())
    assert len(set(aside)) == 3 and all(path is not None and Path(path).is_dir() for path in aside)
    assert near.last_attempt() == 0 and near.read_result() is None and near.read_config() is None
    assert value_at({"a": {"b": 3}}, "a.b") == 3 and value_at({"a": 1}, "a.b") is value_at({}, "a.b") is None
    assert _short("x" * 58) == f'"{"x" * 58}"' and _short("x" * 59) == f'"{"x" * 56}…'


def test_a_mailbox_that_replaces_a_lost_one_goes_on_with_its_attempt() -> None:
    lost, state = Mailbox(previous_attempts=1), RunState()
    for _ in range(3):
        lost.begin(leader=True)
    lost.put({"kind": "begin", "world_size": 1, "resumed_step": 0})
    for record in lost.take(state.attempt):
        state.update(record)
    replacement = Mailbox(previous_attempts=1)
    replacement.put({"kind": "progress", "step": 5})
    assert [record["attempt"] for record in replacement.take(state.attempt)] == [state.attempt] == [4]
    replacement.begin(leader=True)
    replacement.put({"kind": "begin", "world_size": 2, "resumed_step": 5})
    for record in replacement.take(state.attempt):
        state.update(record)
    assert (state.attempt, state.world_size) == (5, 2), "what is decided once per attempt is decided again"


def test_a_mailbox_that_replaces_a_lost_one_is_asked_again() -> None:
    replacement = Mailbox(previous_attempts=1)
    replacement.take(4, restart="there is room for more workers")
    assert replacement.stop_requested() and replacement.restart_reason() == "there is room for more workers"
    replacement.begin(leader=True)  # the restart; its record has not been taken
    replacement.take(4, restart="there is room for more workers")
    assert not replacement.stop_requested(), "the restart has happened"
    replacement.take(5, stop=True)
    assert replacement.stop_requested() and replacement.restart_reason() is None
    replacement.take(5)
    assert replacement.stop_requested()


def test_a_mailbox_counts_attempts_and_what_was_asked() -> None:
    box = Mailbox(previous_attempts=3)
    assert not box.begin(leader=False) and not box.begin(leader=True)
    box.put({"kind": "x"})
    (record,) = box.take()
    assert record["attempt"] == 4 and box.take() == []
    box.request_restart("room")
    assert box.stop_requested() and box.restart_reason() == "room"
    box.begin(leader=False)
    assert box.restart_reason() == "room", "until the next attempt's leader is there"
    box.begin(leader=True)
    assert box.restart_reason() is None and not box.stop_requested()
    box.request_restart("room")
    box.request_stop()
    assert box.stop_requested() and box.restart_reason() is None
    here, there = (7, "here"), (8, "there")
    box.report_waiting(0, here)
    box.report_waiting(1, there)
    assert box.waiting_ranks() == {0: here, 1: there}
    box.report_waiting(0, None)
    assert box.waiting_ranks() == {1: there}
    box.begin(leader=False)
    assert box.waiting_ranks() == {}
    for rank in (2, 2, 0):
        box.put({"kind": "fatal", "rank": rank})
    assert box.num_failed_ranks() == 2
    assert box.begin(leader=True), "the run has failed"
    box.put({"kind": "x"})
    assert box.take()[-1]["attempt"] == 5, "and no attempt is counted any more"
    box.put({"kind": "event", "event": "checkpoint", "step": 5})
    assert box.count_failure() == 1
    box.put({"kind": "event", "event": "other", "step": 9})
    assert box.count_failure() == 2
    box.put({"kind": "event", "event": "checkpoint", "step": 6})
    assert box.count_failure() == 1


class Peers(Silent):
    """What a watch hears of the others, and what it tells."""

    def __init__(self, others: dict[int, Waiting]) -> None:
        super().__init__()
        self.others, self.stops, self.told = others, 0, []  # type: ignore[var-annotated]
        self.mine: dict[int, Waiting] = {}
        self.asked = 0

    def stop_requested(self) -> bool:
        self.stops += 1
        return True

    def report_waiting(self, rank: int, place: Waiting | None) -> None:
        self.told.append(place)
        self.mine = {} if place is None else {rank: place}

    def waiting_ranks(self) -> dict[int, Waiting]:
        self.asked += 1
        return {**self.others, **self.mine}


WAITS, WORKS = CodeLocation("here", ((1, 2),), True), CodeLocation("here", ((1, 2),), False)


def test_unlike_places_are_told_when_they_are_seen_twice() -> None:
    gone_on = (1, "there")  # to the next exchange, while this rank still receives
    for others, unlike in [({1: (0, "there")}, True), ({1: (0, "here")}, False), ({1: gone_on}, False), ({}, False)]:
        ended: list[int] = []
        peers = Peers(others)
        watch = Watch(peers, 0, 2, hang_s=60, suspicious_s=1.0, end=ended.append)
        watch._check(WAITS, 2.0)
        assert not ended
        watch._check(WAITS, 2.5)
        assert ended == ([EXIT_UNLIKE] if unlike else [])
        if unlike:
            text = peers.records[0]["message"]
            assert "collectives: rank 0 in here; rank 1 in there. A model" in text and peers.records[0]["rank"] == 0
            assert peers.records[0]["kind"] == "event", "another attempt may end otherwise"
    moves = Peers({1: (0, "there")})
    watch = Watch(moves, 0, 2, hang_s=60, suspicious_s=1.0, end=None)
    for number in range(4):
        moves.others = {1: (0, f"line {number}")}
        watch._check(WAITS, 2.0)
    assert not moves.records, "something moves"
    watch = Watch(peers := Peers({1: (0, "there")}), 1, 2, hang_s=60, suspicious_s=1.0, end=None)
    for place, still_s in [(WORKS, 9.0), (WAITS, 1.0)]:
        watch._check(place, still_s)
    assert peers.told == [] and peers.stops == 0, "only rank 0 asks, and only who waits for long tells"
    for place, still_s in [(WAITS, 1.1), (WORKS, 9.0), (WORKS, 9.0), (WAITS, 1.1)]:
        watch._check(place, still_s)
    assert peers.told == [(0, "here"), None, (0, "here")], "that it goes on is told once"
    assert not peers.records, "the two times did not follow each other"
    assert peers.asked == 0, "rank 0 asks for all reports"
    first = Watch(peers, 0, 2, hang_s=60, end=None)
    first._check(WORKS, 0.0)
    first._check(WORKS, 0.0)
    assert peers.stops == 1 and first.stop_requested(), "asked until it is so"


class Counted(Mailbox):
    """A mailbox that counts the reports, and the questions for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.reports = self.questions = 0

    def report_waiting(self, rank: int, waiting: Waiting | None) -> None:
        self.reports += 1
        super().report_waiting(rank, waiting)

    def waiting_ranks(self) -> dict[int, Waiting]:
        self.questions += 1
        return super().waiting_ranks()


@settings(max_examples=25, deadline=None)
@given(world_size=st.integers(5, 50), silent=st.sets(st.integers(0, 3)))
def test_one_rank_asks_who_waits_and_the_next_where_it_is_silent(world_size: int, silent: set[int]) -> None:
    """`silent`: ranks whose watch stops after its first report."""
    box, told = Counted(), list[int]()
    watches = {
        rank: Watch(box, rank, world_size, hang_s=1e9, suspicious_s=5.0, end=lambda _, rank=rank: told.append(rank))
        for rank in range(world_size)
    }
    watches[0]._stop.set()  # rank 0 also asks for stops, until it hears of one
    elsewhere = CodeLocation("there", ((1, 2),), True)
    first = min(set(range(world_size)) - silent)
    for poll in range(int((10.0 + (first + 1) * TURN_S) / POLL_S)):
        questions = box.questions
        for rank, watch in list(watches.items()):
            watch._check(elsewhere if rank == 1 else WAITS, poll * POLL_S)
            if rank in silent and box.reports:
                del watches[rank]
        assert box.questions - questions <= 1
        if told:
            break
    assert told == [first]
    assert box.reports <= world_size * (first + 1)


SLEEPS = "import time\ndef sleep(stop):\n    while not stop.is_set():\n        time.sleep(0.01)\n"


@pytest.mark.parametrize(("module", "waits"), [("torch.distributed.x", True), ("rayrec.distributed.x", False)])
def test_a_thread_waits_where_its_innermost_line_is_an_exchange(module: str, waits: bool) -> None:
    names: dict[str, Any] = {"__name__": module}
    exec(SLEEPS, names)
    stop = threading.Event()
    thread = threading.Thread(target=names["sleep"], args=(stop,))
    thread.start()
    assert thread.ident is not None
    until = time.monotonic() + 10
    while not (found := location_of(thread.ident)).line.startswith("threading.run" if waits else module):
        assert time.monotonic() < until
    place = location_of(thread.ident)
    stop.set()
    thread.join()
    assert found.in_exchange == waits
    assert place.line.rpartition(",")[0] == ("threading.run" if waits else f"{module}.sleep")
    assert location_of(-1) == CodeLocation("", (), False)


def of_rows(rows: int, weighted: bool = False) -> Batch:
    """Two features with up to three ids a row, drawn alike for alike arguments."""
    draw = torch.Generator().manual_seed(rows)
    lengths = torch.randint(0, 4, (2 * rows,), generator=draw)
    values = torch.arange(int(lengths.sum()))
    sparse = KeyedJaggedTensor(["f", "g"], values, values / 7.0 if weighted else None, lengths=lengths, stride=rows)
    weight = torch.rand(rows, generator=draw) if weighted else None
    return Batch(torch.rand(rows, 3, generator=draw), sparse, torch.arange(rows).float(), weight)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 9), st.data(), st.booleans())
def test_a_part_of_a_batch_has_its_rows(rows: int, data: st.DataObject, weighted: bool) -> None:
    whole = of_rows(rows, weighted)
    start, stop = sorted(data.draw(st.tuples(st.integers(0, rows), st.integers(0, rows))))
    part = micro_batch_of(whole, start, stop)
    assert part.rows == stop - start and part.sparse.stride() == stop - start
    assert torch.equal(part.dense, whole.dense[start:stop]) and torch.equal(part.label, whole.label[start:stop])
    assert part.sparse.keys() == ["f", "g"]
    for key in ("f", "g"):
        told, all_of = part.sparse[key].to_dense(), whole.sparse[key].to_dense()
        assert [row.tolist() for row in told] == [row.tolist() for row in all_of[start:stop]]
    if weighted:
        assert part.weight is not None and torch.equal(part.weight, whole.weight[start:stop])  # type: ignore[index]
        assert torch.equal(part.sparse.weights(), part.sparse.values() / 7.0)
    else:
        assert part.weight is None and part.sparse.weights_or_none() is None


def scores_of(bucket: str) -> Scores:
    raw = raw_config(NOWHERE)
    raw["schema"]["timestamp"] = {"column": "at", "bucket": bucket}
    return Scores(parse_config(raw).data_schema, session_alone(Silent()))


@pytest.mark.parametrize(
    ("bucket", "times", "starts"),
    [
        ("hour", [0, 3599, 3600, 90_000], ["1970-01-01 00:00"] * 2 + ["1970-01-01 01:00", "1970-01-02 01:00"]),
        ("day", [0, 86_399, 86_400], ["1970-01-01", "1970-01-01", "1970-01-02"]),
        ("week", [0, 4 * 86_400 - 1, 4 * 86_400, 11 * 86_400], ["1969-12-29"] * 2 + ["1970-01-05", "1970-01-12"]),
    ],
)
def test_stretches_of_time_begin_at_whole_hours_days_and_mondays(bucket: str, times: Any, starts: list[str]) -> None:
    for at, start in zip(times, starts, strict=True):
        scores = scores_of(bucket)
        batch = of_rows(2)
        batch = replace(batch, time=torch.tensor([at, at]))
        scores.add(batch, torch.tensor([0.5, -0.5]))
        (stretch,) = scores.compute()["by_time"]
        assert stretch["start"] == start and stretch["samples"] == 2


def test_figures_of_groups_join_those_of_their_label() -> None:
    first = {"a": 1, "tasks": {"x": {"a": 1}, "y": {"a": 2}}}
    second = {"g": 3, "tasks": {"x": {"g": 3}, "y": {"g": 4}}}
    assert _merged(first, second) == {"a": 1, "g": 3, "tasks": {"x": {"a": 1, "g": 3}, "y": {"a": 2, "g": 4}}}
    assert _merged({"a": 1}, {"g": 2}) == {"a": 1, "g": 2}


def test_a_position_adds_up_its_steps() -> None:
    given = StepInput(of_rows(2), 5, 2.0, 0.4, Cursor.start(3), wait_s=0.25)
    later = START.after(given, 1.5, 4.0).after(given, 0.5, 6.0)
    assert (later.step, later.samples, later.seconds, later.wait_s, later.epoch) == (2, 10, 2.0, 0.5, 3)
    assert later.elapsed_s == 6.0
    alone = Control(0, 1, None)
    merged = replace(START, skipped=2, cursor=replace(Cursor.start(1), skipped=5)).merged(alone)
    assert merged.skipped == 7 and merged.cursor.skipped == 0 and merged.epoch == 1
    assert given.on(CPU) is given and (given.stop, given.clock) == (False, 0.0)
    by_steps = Every(Interval(steps=3))
    assert [by_steps.is_due(step, 0.0) for step in range(1, 7)] == [False, False, True, False, False, True]
    by_time = Every(Interval(seconds=2.0))
    assert [by_time.is_due(1, clock) for clock in (7.0, 8.0, 9.0, 10.0, 11.5)] == [False, False, True, False, True]
    by_time.restart()
    assert [by_time.is_due(1, clock) for clock in (99.0, 100.0, 101.0)] == [False, False, True]
    never = Every(None)
    assert not never.is_due(1, 0.0) and not never.is_due(2, 1e9) and not never.is_early(1)
    assert [str(purpose) for purpose in Purpose] == ["step", "evaluation step", "check", "sum", "gather"]
    with pytest.raises(AssertionError, match="too many numbers for an exchange"):
        alone.sums([0.0] * 7)
    assert alone.sums([1.0] * 6) == [1.0] * 6


def test_the_first_steps_are_early_until_the_first_duration_has_passed() -> None:
    def early(every: Every, clocks: list[float]) -> list[int]:
        steps = enumerate(clocks, start=1)
        return [step for step, clock in steps if not every.is_due(step, clock) and every.is_early(step)]

    ten_s = Interval(seconds=10.0)
    assert early(Every(ten_s), [0.1] * 63) == [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48]
    assert early(Every(ten_s), [0.0, 4.0, 8.0, 10.0, 10.0, 10.0, 10.0, 10.0]) == [1, 2, 3]
    assert early(Every(Interval(steps=5)), [0.0] * 63) == []


def window_of(steps: int, loss: float = 2.0) -> Window:
    window = Window(CPU, Control(0, 1, None), None)
    for _ in range(steps):
        window.add(StepInput(of_rows(4), 4, 2.0, 1.0, 0, wait_s=0.5), torch.tensor(loss), torch.zeros(4), 2.0)
    return window


def test_a_window_refuses_a_loss_that_is_not_finite_and_begins_anew() -> None:
    window = window_of(3)
    window.check(3)
    with pytest.raises(TrainError, match="not finite at step 3"):
        window.check(3, sound=False)
    figures = window.close(3)
    assert (figures["loss"], figures["samples_per_second"], figures["data_wait_fraction"]) == (2.0, 2.0, 0.25)
    assert figures.keys() >= {"ne", "auc"} and window.empty
    assert window.close(3)["loss"] is None and window.close(3)["samples_per_second"] == 0.0
    bad = window_of(1, math.nan)
    with pytest.raises(TrainError, match="at step 9"):
        bad.close(9)
    assert bad.empty and bad.close(10)["loss"] is None
    waiting = window_of(0)
    waiting.add(StepInput(of_rows(4), 4, 2.0, 1.0, 0, wait_s=5.0), torch.tensor(1.0), torch.zeros(4), 2.0, 0.5)
    figures = waiting.close(1)
    assert (figures["data_wait_fraction"], figures["exchange_fraction"]) == (1.0, 0.25)
    assert waiting.state()["window/sums"].tolist() == [0.0] * 7


class Skipping:
    """A stream's count of rows left out."""

    def __init__(self) -> None:
        self.count, self.samples = 0, []  # type: ignore[var-annotated]

    @property
    def skipped(self) -> Skipping:
        return self

    def see(self, row: int) -> None:
        self.count += 1
        self.samples.append(Sample(row))


class Sample:
    def __init__(self, row: int) -> None:
        self.row = row

    def to_dict(self) -> dict[str, int]:
        return {"row": self.row}


def test_skipped_rows_are_told_once() -> None:
    stream = Skipping()
    rows: Any = SkippedRows(stream, Control(0, 1, None), "training")  # type: ignore[arg-type]
    assert rows.event(0) is None
    stream.see(4)
    found = rows.event(1)
    assert found["message"] == "1 training row could not be used and was skipped in epoch 2"
    assert (found["count"], found["samples"]) == (1, [{"row": 4}])
    assert rows.event(1) is None
    for row in (5, 6):
        stream.see(row)
    found = rows.event(0)
    assert found["message"] == "2 training rows could not be used and were skipped in epoch 1"
    assert (found["count"], found["samples"]) == (2, [{"row": 5}, {"row": 6}])


def test_the_plans_table_in_words() -> None:
    shards = [{"shard_sizes": [842, 32]}, {"shard_sizes": [10, 64]}]
    assert _sizes(shards) == "2 of 842 × 32"
    assert [ranks_text(ranks) for ranks in ([0, 1, 2, 3, 6], [4], [], [1, 3, 4])] == ["0–3, 6", "4", "", "1, 3–4"]
    memory = {"rank": 3, "weights_bytes": 1500, "optimizer_bytes": 10, "dense_bytes": 2_000_000}
    assert memory_lines({"memory": [memory]}) == ["rank 3: 1.5 KiB weights, 10 B optimizer, 1.9 MiB dense"]
    assert memory_lines({}) == host_lines({}) == []
    small = {"ranks": 1, "memory_bytes": 2**30, "cpus": 2.5, "gpu": None}
    large = {"ranks": 2, "memory_bytes": 2**30, "cpus": 4.0, "gpu": "H100"}
    hosts = {"planned_for": {"hosts": [small, large, small], "speeds": "presets", "exchange": "one"}}
    assert host_lines(hosts) == [
        "planned for 2 × host of 1 rank (1.0 GiB, 2.5 CPUs), host of 2 ranks (1.0 GiB, 4 CPUs, H100); speeds: presets",
        "vectors: one",
    ]


class Says:
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, text: str, style: str | None = None) -> None:
        self.lines.append(text)


def test_lines_that_were_never_written_are_counted(tmp_path: Path) -> None:
    for count, told in [(1, "1 line could not be written"), (2, "2 lines could not be written")]:
        display: Any = Says()
        lines = Lines(tmp_path / "none" / "x", display)
        for number in range(count):
            lines.add(str(number))
        lines.close()
        assert len(display.lines) == 2 and display.lines[1].endswith(told)
    display = Says()
    lines = Lines(tmp_path / "x", display)
    (tmp_path / "x").write_bytes(b"half")  # of a driver that was killed
    lines.add("a")
    lines.add("b")
    lines.close()
    assert (tmp_path / "x").read_bytes() == b"half\na\nb\n" and display.lines == []


def test_a_mailbox_of_this_process_is_its_own_sink() -> None:
    box, seen = Mailbox(), []  # type: ignore[var-annotated]
    with handling_records(box.take, seen.append, every_s=0.001):
        assert not box.begin(leader=True) and not box.stop_requested()
        for number in range(2000):
            box.put({"kind": "a", "number": number})
        box.flush({"kind": "fatal", "rank": 1})
    assert [record.get("number") for record in seen] == [*range(2000), None] and box.num_failed_ranks() == 1
    assert all(abs(record["time"] - time.time()) < 600 and record["attempt"] == 1 for record in seen)


def test_neighbours_are_the_ranks_of_ones_host() -> None:
    from rayrec.train.worker.machine import Machine

    def session(rank: int) -> Session:
        machines = [Machine(node=node, name=node, memory_bytes=1, cpus=1.0) for node in "aab"]
        control = Control(rank, 3, None)
        return Session(device=CPU, group=None, control=control, sink=Silent(), machines=tuple(machines))

    assert [session(rank).neighbours for rank in range(3)] == [[0, 1], [0, 1], [2]]
    assert (session(2).rank, session(2).world_size) == (2, 3)
