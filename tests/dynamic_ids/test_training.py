"""Runs with dynamic ids: the same on any number of ranks, across resumes, and unchanged by evaluations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from rayrec.checkpoint import CheckpointStore
from rayrec.dynamic_ids import first_weights
from rayrec.train import ConfigError, parse_config
from tests.ranks import on_ranks
from tests.train.small import fit_job, fit_on_rank, learner_of, make_job, rank_session, raw_config, write_all

RULES: dict[str, dict[str, Any]] = {
    "user": {"kind": "dynamic", "time": "at", "ttl": "12h", "evict": "lru"},
    "item": {"kind": "dynamic", "admit": {"min_count": 2}},
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


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_number_of_ranks_and_any_plan_train_the_same(data: Path, alone: Any, ranks: int) -> None:
    """Also with more ranks than buckets, where a rank owns none; evaluations agree as well."""
    raw = raw_of(data, data / f"ranks-{ranks}", ranks)
    (outcome, *_), (expected, tensors) = on_ranks(ranks, fit_on_rank, raw), alone
    assert_alike(saved(raw), tensors)
    assert outcome["eval"]["ne"] == pytest.approx(expected["eval"]["ne"], abs=1e-4)


def test_a_run_goes_on_bit_for_bit_also_on_other_numbers_of_ranks(data: Path, alone: Any) -> None:
    raw, stages = raw_of(data, data / "moved"), [(2, 5), (3, 9), (1, None)]
    for ranks, steps in stages:
        raw["sharding"]["constraints"], raw["trainer"]["max_steps"] = PLANS[ranks], steps
        on_ranks(ranks, fit_on_rank, raw) if ranks > 1 else fit_job(make_job(raw))
    assert_alike(saved(raw), alone[1])
    again = raw_of(data, data / "resumed", trainer__max_steps=6)
    fit_job(make_job(again))
    again["trainer"]["max_steps"] = None
    fit_job(make_job(again))
    assert all(torch.equal(tensor, alone[1][name]) for name, tensor in saved(again).items())


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
