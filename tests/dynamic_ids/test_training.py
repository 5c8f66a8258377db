"""Runs with dynamic ids: the same on any number of ranks, across resumes, and unchanged by evaluations."""

from __future__ import annotations

import dataclasses
import itertools
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed as dist
from torch import nn

from rayrec.checkpoint import CheckpointStore
from rayrec.dynamic_ids import DynamicIds, Evict, advance, first_weights, newest_times
from rayrec.models import DLRM, Batch
from rayrec.sparse import KeyedJaggedTensor
from rayrec.train import ConfigError, parse_config
from tests.dynamic_ids.oracle import Oracle
from tests.ranks import RankError, on_ranks
from tests.train.small import fit_job, fit_on_rank, learner_of, make_job, rank_session, raw_config, write_all

RULES: dict[str, dict[str, Any]] = {
    "user": {"kind": "dynamic", "time": "at", "ttl": "12h", "evict": "lru", "admit": {"min_count": 1}},
    "item": {"kind": "dynamic", "evict": "lfu", "admit": {"min_count": 2}},
    "city": {"kind": "dynamic", "rows": 8, "unseen": "zero"},  # texts
}
PLANS: dict[int, dict[str, Any]] = {
    1: {},
    2: {name: {"sharding_types": ["row_wise"]} for name in ("user", "item", "city")},
    3: {
        "user": {"sharding_types": ["column_wise"], "min_partition": 4},
        "item": {"sharding_types": ["data_parallel"]},
        "city": {"sharding_types": ["table_wise"]},
    },
    5: {name: {"sharding_types": ["table_wise"]} for name in ("user", "item", "city")},
}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_all(tmp_path_factory.mktemp("dynamic"), rows=700)


def raw_of(data: Path, runs: Path, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """A config whose steps have the same rows on any number of ranks."""
    # Row-wise Adagrad keeps one number a row and shard, so columns that are cut apart train a little differently.
    more = {"storage__path": str(runs), "data__shuffle": "none", "optimizers__sparse": {"kind": "adagrad", "lr": 0.1}}
    raw = raw_config(data, sharding={"constraints": PLANS[ranks]}, **{**more, **changes})
    user, item, tags = raw["schema"]["sparse"]
    city = {"name": "city", "mapping": RULES["city"]}
    raw["schema"]["sparse"] = [{**user, "mapping": RULES["user"]}, {**item, "mapping": RULES["item"]}, city, tags]
    raw["tables"][0]["rows"], raw["tables"][1]["rows"] = 24, 30
    raw["tables"].insert(2, {"name": "city", "rows": 8, "dim": 8, "features": ["city"]})
    return raw


def saved(raw: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors of maps and tables in the newest checkpoint."""
    store = CheckpointStore(Path(raw["storage"]["path"]) / raw["name"] / "checkpoints")
    newest = store.latest()
    assert newest is not None
    with store.reader(newest) as reader:
        names = [name for name in reader.index.tensors if name.startswith(("map/", "table"))]
        return {name: reader.tensor(name) for name in names}


def assert_alike(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Maps bit for bit, weights and states within the order of float sums."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        exact = name.startswith("map/")
        rtol, atol = (0.0, 0.0) if exact else (1e-3, 1e-4)
        assert torch.allclose(actual[name].double(), tensor.double(), rtol, atol), (name, actual[name] - tensor)


@pytest.fixture(scope="module")
def alone(data: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The outcome of a run on one rank, and what it saved."""
    raw = raw_of(data, data / "alone")
    return fit_job(make_job(raw)), saved(raw)


def test_a_run_is_plain_torch_with_a_dictionary(data: Path) -> None:
    """An unsharded model and torch's optimizers; rows come from the dictionary model, which also says what to reset."""
    raw, given = raw_of(data, data / "oracle"), dict[str, Any]()
    raw["schema"]["sparse"].pop(2)
    raw["tables"].pop(2)
    fit_job(make_job(raw))
    tensors = saved(raw)

    def keeping(**arguments: Any) -> DLRM:
        given.update(arguments)
        return DLRM(**arguments)

    learner = learner_of(dataclasses.replace(make_job(raw), factory=keeping))
    model = DLRM(**{**given, "device": "cpu", "tables_device": "cpu"})
    bags = {name: bag.weight for name, bag in model.embedding_bags.embedding_bags.items()}
    tables = {name.rpartition(".")[2]: table for name, table in learner.model.tables().items()}
    others = dict(model.named_parameters())
    with torch.no_grad():
        for name, table in tables.items():
            bags[name].copy_(table.local[0].weight)
        for name, parameter in learner.model.other_parameters().items():
            others[name].copy_(parameter)
    dense = torch.optim.Adam([p for name, p in others.items() if not name.startswith("embedding_bags")], lr=0.01)
    sparse = torch.optim.Adagrad([*bags.values()], lr=0.1, eps=1e-8)
    oracles = {
        "user": Oracle(DynamicIds(rows=24, evict=Evict.LRU, ttl_s=12 * 3600)),
        "item": Oracle(DynamicIds(rows=30, min_count=2)),
    }
    whole, step = pa.concat_tables([pq.read_table(path) for path in sorted((data / "train").iterdir())]), 0
    for start in 2 * [*range(0, len(whole), 64)]:
        rows, step = whole.slice(start, 64), step + 1
        clocks = {"user": advance(oracles["user"].clock, [newest_times(rows["at"].to_numpy())]), "item": step}
        ids = []
        for name, oracle in oracles.items():
            row_of, changes = oracle.step(rows[name].to_pylist(), clocks[name])
            taken = [(row, new) for row, _, new in changes if new is not None]
            for row, new in taken:
                bound, keys = bags[name].shape[0] ** -0.5, np.array([new])
                first = first_weights(keys, 8, table=name, seed=tables[name].seed, low=-bound, high=bound)
                with torch.no_grad():
                    bags[name][row] = torch.from_numpy(first[0])
                    sparse.state[bags[name]]["sum"][row] = 0
            ids += [row_of[key] for key in rows[name].to_pylist()]
        tags = rows["tags"].to_pylist()
        lengths = torch.tensor([1] * (2 * len(rows)) + [len(one) for one in tags])
        values = torch.tensor(ids + [tag for one in tags for tag in one])
        kjt = KeyedJaggedTensor(["user", "item", "tags"], values, lengths=lengths)
        label = torch.tensor(rows["label"].to_pylist()).float()
        model.zero_grad()
        model(Batch(torch.tensor(rows["age"].to_pylist())[:, None], kjt, label))[0].backward()
        sparse.step()
        dense.step()
    for name, oracle in oracles.items():
        state = {key: tensors[f"map/{name}/{key}"].tolist() for key in ("identity", "score", "last_seen")}
        used = [row for row, count in enumerate(state["score"]) if count]
        assert {row: tuple(state[key][row] for key in state) for row in used} == oracle.rows
    for name, weights in bags.items():
        (key,) = (key for key in tensors if key.startswith("table/") and key.endswith(f".{name}"))
        torch.testing.assert_close(tensors[key], weights.detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_number_of_ranks_and_any_plan_train_the_same(data: Path, alone: Any, ranks: int) -> None:
    """Also with more ranks than buckets, where a rank owns none; evaluations agree as well."""
    raw = raw_of(data, data / f"ranks-{ranks}", ranks)
    (outcome, *_), (expected, tensors) = on_ranks(ranks, fit_on_rank, raw), alone
    assert_alike(saved(raw), tensors)
    assert outcome["eval"]["ne"] == pytest.approx(expected["eval"]["ne"], abs=1e-4)


def fit_until_killed(group: dist.ProcessGroup, raw: dict[str, Any], steps: int) -> None:
    """Trains that many steps in this launch; then the last rank kills itself, while the others wait for it."""

    def dying(**arguments: Any) -> DLRM:
        model, begun = DLRM(**arguments), itertools.count()

        def kill(module: nn.Module, _: Any) -> None:
            if module.training and next(begun) == steps:
                os.kill(os.getpid(), signal.SIGKILL)

        if group.rank() == group.size() - 1:
            model.register_forward_pre_hook(kill)
        return model

    fit_job(dataclasses.replace(make_job(raw), factory=dying), group)


@pytest.mark.long
def test_a_killed_run_goes_on_bit_for_bit_also_on_other_numbers_of_ranks(data: Path, alone: Any) -> None:
    """Each launch is killed some steps after the checkpoint that it began from."""
    raw = raw_of(data, data / "moved", trainer__checkpoint_every=2)
    store, reached = CheckpointStore(data / "moved" / raw["name"] / "checkpoints"), [0]
    for ranks, steps in ((1, 5), (2, 6), (3, 5), (5, 6)):
        raw["sharding"]["constraints"] = PLANS[ranks]
        with pytest.raises(RankError, match="the process died"):
            on_ranks(ranks, fit_until_killed, raw, steps)
        newest = store.latest()
        assert newest is not None
        reached.append(newest.step)
    raw["sharding"]["constraints"] = PLANS[1]
    outcome = fit_job(make_job(raw))
    assert reached == sorted({*reached}) and reached[-1] < outcome["steps"] == alone[0]["steps"]
    assert_alike(saved(raw), alone[1])


def test_a_run_goes_on_bit_for_bit_also_on_other_numbers_of_ranks(data: Path, alone: Any) -> None:
    raw, stages = raw_of(data, data / "stopped"), [(1, 3), (2, 7), (3, 11), (5, 16), (1, None)]
    for ranks, steps in stages:
        raw["sharding"]["constraints"], raw["trainer"]["max_steps"] = PLANS[ranks], steps
        on_ranks(ranks, fit_on_rank, raw) if ranks > 1 else fit_job(make_job(raw))
    assert_alike(saved(raw), alone[1])
    again = raw_of(data, data / "resumed", trainer__max_steps=6)
    fit_job(make_job(again))
    again["trainer"]["max_steps"] = None
    fit_job(make_job(again))
    assert all(torch.equal(tensor, alone[1][name]) for name, tensor in saved(again).items())


def with_increments(data: Path, runs: Path, every: int, **changes: Any) -> dict[str, Any]:
    """A config with increments, and one table so large that few of its rows change before half of them have."""
    raw = raw_of(data, runs, storage__increments={"every": every}, storage__keep=100, **changes)
    raw["tables"][3]["rows"] = 20_000
    return raw


def checkpoints_of(raw: dict[str, Any]) -> dict[int, tuple[bool, dict[str, torch.Tensor]]]:
    """By step, whether the newest checkpoint is an increment, and all its tensors."""
    store = CheckpointStore(Path(raw["storage"]["path"]) / raw["name"] / "checkpoints")
    found = {}
    for checkpoint in store.all():
        with store.reader(checkpoint) as reader:
            tensors = {name: reader.tensor(name) for name in reader.index.tensors}
        found[checkpoint.step] = (checkpoint.manifest.link is not None, tensors)
    return found


def test_increments_have_the_maps_of_their_step(data: Path) -> None:
    """Each increment has the tensors of the full checkpoint that another run has at its step, bit for bit."""
    changes = {"trainer__max_steps": 12, "storage__background": False}
    raw = with_increments(data, data / "increments", 1, trainer__checkpoint_every=6, **changes)
    full = with_increments(data, data / "full", 1000, trainer__checkpoint_every=1, **changes)
    fit_job(make_job(raw))
    fit_job(make_job(full))
    found, expected = checkpoints_of(raw), checkpoints_of(full)
    assert [step for step, (is_increment, _) in found.items() if not is_increment] == [1, 6, 12]
    assert [*found] == [*expected] == [*range(1, 13)]
    for step, (_, tensors) in expected.items():
        assert found[step][1].keys() == tensors.keys()
        for name, tensor in tensors.items():
            seconds = name == "tensor/window/sums"  # has times of the run
            assert seconds or torch.equal(found[step][1][name], tensor), (step, name)


@pytest.mark.long
def test_a_killed_run_goes_on_from_its_increments_bit_for_bit(data: Path) -> None:
    raw = with_increments(data, data / "uninterrupted", 1000)
    raw["sharding"]["constraints"] = PLANS[2]
    on_ranks(2, fit_on_rank, raw)
    killed = with_increments(data, data / "killed", 1, trainer__checkpoint_every=1000, storage__background=False)
    killed["sharding"]["constraints"] = PLANS[2]
    store, reached = CheckpointStore(data / "killed" / raw["name"] / "checkpoints"), [0]
    for steps in (5, 6):
        with pytest.raises(RankError, match="the process died"):
            on_ranks(2, fit_until_killed, killed, steps)
        newest = store.latest()
        assert newest is not None and newest.manifest.link is not None
        reached.append(newest.step)
    on_ranks(2, fit_on_rank, killed)
    assert reached == sorted({*reached})
    assert all(torch.equal(tensor, saved(raw)[name]) for name, tensor in saved(killed).items())


def test_evaluations_change_nothing(data: Path, alone: Any) -> None:
    raw = raw_of(data, data / "evaluated", trainer__eval_every=3)
    fit_job(make_job(raw))
    assert all(torch.equal(tensor, alone[1][name]) for name, tensor in saved(raw).items())


def test_a_row_starts_from_its_id_whoever_had_it_before(data: Path) -> None:
    """Without training of tables each row in use has the first weights of its id, although ids changed often."""
    raw = raw_of(data, data / "frozen", optimizers__sparse={"kind": "adam", "lr": 1e-30})
    outcome = fit_job(make_job(raw))
    tensors, tables = saved(raw), learner_of(make_job(raw)).model.tables()
    for name, rows in (("user", 24), ("item", 30), ("city", 8)):
        used = tensors[f"map/{name}/score"] > 0
        ids = tensors[f"map/{name}/identity"][used].numpy()
        (path,) = (path for path in tables if path.endswith(f".{name}"))
        table, seed = tensors[f"table/{path}"], tables[path].seed
        bound = rows**-0.5
        expected = first_weights(ids, 8, table=name, seed=seed, low=-bound, high=bound)
        assert len(ids) > 3 and outcome["steps"] > 10
        assert torch.equal(table[: len(used)][used], torch.from_numpy(expected)), name


OPTIMIZERS = ("sgd", "adagrad", "rowwise_adagrad", "adam", "partial_rowwise_adam", "lamb", "lars_sgd")


def renewed(group: dist.ProcessGroup, raw: dict[str, Any]) -> list[tuple[str, bool, bool]]:
    """For each optimizer: whether rows are reset in weights and in every state, and whether the others stay."""
    results = []
    for kind in OPTIMIZERS:
        raw["optimizers"]["sparse"], raw["name"] = {"kind": kind, "lr": 0.1}, kind
        learner = learner_of(make_job(raw), rank_session(group))
        rows, vectors = torch.tensor([1, 5, 23]), torch.randn(3, 8)
        for name, table in learner.model.tables().items():
            if not name.endswith(".user"):
                continue
            for item in table.local:
                item.weight.fill_(2.0)
                for state in item.state.values():
                    state.fill_(3.0)
            table.renew_rows(rows, vectors)
            for item in table.local:
                span, cols = item.shard.rows, item.shard.cols
                mine = (rows >= span.start) & (rows < span.stop)
                local = rows[mine] - span.start
                others = torch.ones(span.size, dtype=torch.bool)
                others[local] = False
                reset = torch.equal(item.weight[local], vectors[mine, cols.start : cols.stop])
                reset &= all(bool((state[local] == 0).all()) for state in item.state.values())
                kept = bool((item.weight[others] == 2).all())
                kept &= all(bool((state[others] == 3).all()) for state in item.state.values())
                results.append((kind, reset, kept))
    return results


@pytest.mark.parametrize("plan", ["row_wise", "column_wise", "data_parallel"])
def test_weights_and_every_state_of_a_row_are_reset(data: Path, plan: str) -> None:
    raw = raw_of(data, data / "reset")
    raw["sharding"]["constraints"] = {"user": {"sharding_types": [plan], "min_partition": 4}}
    for results in on_ranks(2, renewed, raw):
        assert {kind for kind, *_ in results} == {*OPTIMIZERS}
        assert all(reset and kept for _, reset, kept in results), results


def shared_with_hash(raw: dict[str, Any]) -> None:
    raw["tables"][0]["features"].append("tags")
    raw["tables"].pop(3)


REFUSED: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "shared": (shared_with_hash, "share the rows of table 'user'"),
    "2d": (lambda raw: raw["sharding"].update(replicas=2), "2D parallelism"),
    "rows": (lambda raw: raw["tables"][2].update(rows=9), "mapping.rows of its features is 8"),
    "dense": (
        lambda raw: raw["sharding"].update(constraints={"item": {"compute_kernels": ["dense"]}}),
        "cannot be `dense`",
    ),
    "no time": (lambda raw: raw["schema"]["sparse"][1]["mapping"].update(ttl="3d"), "needs `time`"),
    "ttl 0": (lambda raw: raw["schema"]["sparse"][1]["mapping"].update(ttl=0), "greater than or equal to 1"),
    "ttl": (lambda raw: raw["schema"]["sparse"][0]["mapping"].update(ttl="3 moons"), "a duration such as 30d"),
    "two times": (lambda raw: raw["schema"]["sparse"][1]["mapping"].update(time="row"), "need the same column"),
    "decay": (lambda raw: raw["schema"]["sparse"][0]["mapping"].update(evict="lfu_decay"), "belong together"),
    "admit": (
        lambda raw: raw["schema"]["sparse"][1]["mapping"]["admit"].update(probability=0.5), "set one of them",
    ),
    "one row": (lambda raw: raw["tables"][1].update(rows=1), "at least 4 rows"),
    "slices": (lambda raw: raw["trainer"].update(slices=["city"]), "whose rows change owners"),
    "path": (lambda raw: raw["schema"]["sparse"][2]["mapping"].update(path="ids.bin"), "only exports have a file"),
    "option": (lambda raw: raw["schema"]["sparse"][0]["mapping"].update(evikt="lru"), "evikt"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_possible_is_refused_by_name(tmp_path: Path, name: str) -> None:
    change, text = REFUSED[name]
    raw = parse_config(raw_of(tmp_path, tmp_path)).to_dict()
    change(raw)
    with pytest.raises(ConfigError, match=text):
        parse_config(raw)
