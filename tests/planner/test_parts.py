"""Parts that are passed to the planner by hand, and what it reads of a model."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from rayrec.distributed.plan.sharding_plan import ShardingPlan
from rayrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from rayrec.distributed.planner.bases import ShardEstimator
from rayrec.distributed.planner.enumerators import EmbeddingEnumerator
from rayrec.distributed.planner.options import options
from rayrec.distributed.planner.parts import Perf, Proposal, Shard, Storage, bytes_of, cost_of
from rayrec.distributed.planner.perf_models import NoopPerfModel, NoopStorageModel
from rayrec.distributed.planner.stats import NoopEmbeddingStats
from rayrec.distributed.planner.storage import shard_storage
from rayrec.distributed.planner.tables import dense_bytes, find_tables, for_world, planner_tables
from rayrec.distributed.planner.types import PlannerError
from rayrec.modules import EmbeddingBagCollection
from tests.planner.problems import KINDS, SHARDER, collection, table
from tests.planner.test_by_hand import TABLE, TOPOLOGY
from tests.planner.test_partitioners import way

MODEL = nn.ModuleDict({"ebc": collection([table("t", 10, 64), table("u", 3, 32)])})
MACHINES = {
    "cpu": Topology(4, "cpu", hosts=[1, 3]),
    "cuda": Topology(4, "cuda", local_world_size=2, hbm_cap=1 << 30, ddr_cap=1 << 33),
}


@pytest.mark.parametrize("kind", MACHINES)
def test_every_option_is_listed_with_its_shards_costs(kind: str) -> None:
    topology = MACHINES[kind]
    enumerator = EmbeddingEnumerator(topology, 64)
    space = enumerator.enumerate(MODEL, [SHARDER])
    assert enumerator.last_stored_search_space is space
    tables = planner_tables(find_tables(MODEL, [SHARDER], kind), topology, {}, 64)
    wanted = [(one, option) for n, one in enumerate(tables) for option in options(n, one, topology, off_device=True)]
    assert [(o.name, o.sharding_type, o.compute_kernel) for o in space] == [
        (one.name, option.sharding_type, option.kernel) for one, option in wanted
    ]
    for made, (facts, option) in zip(space, wanted, strict=True):
        assert made.tensor is MODEL["ebc"].embedding_bags[facts.name].weight and made.module == ("ebc", MODEL["ebc"])
        assert made.input_lengths == [1.0] and made.batch_size == 64 and made.is_pooled
        cached = option.kernel == "fused_uvm_caching"
        assert made.cache_load_factor == (option.cache_load_factor if cached else None)
        each = made.num_shards // len(option.units)
        for number, shard in enumerate(made.shards):
            unit, place = option.units[number // each], number % each
            step = -(-facts.rows // each)
            rows = min((place + 1) * step, facts.rows) - min(place * step, facts.rows)
            first = place * step if rows else facts.rows
            if option.sharding_type == "data_parallel":
                first, rows, step = 0, facts.rows, facts.rows
            assert (shard.size, shard.offset) == ([rows, unit.cols.size], [first, unit.cols.start])
            share, storage, perf = rows / step, bytes_of(shard), cost_of(shard)
            assert perf.total == pytest.approx(1000 * unit.seconds[-1] * share)
            assert perf.fwd_compute == pytest.approx(1000 * unit.lookup[-1] * share)
            held, beside = int(unit.device_bytes[-1] * share), int(unit.host_bytes[-1] * share)
            assert storage == (Storage(0, held + beside) if kind == "cpu" else Storage(held, beside))
        ranks = {"row_wise": 4, "data_parallel": 4, "table_row_wise": 3 if kind == "cpu" else 2}
        assert each == (ranks | {"grid_shard": ranks["table_row_wise"]}).get(option.sharding_type, 1)


class Twice(ShardEstimator):
    """Every shard takes two milliseconds."""

    def __init__(self, topology: Any = None, constraints: Any = None) -> None: ...

    def estimate(self, sharding_options: Proposal, sharder_data_map: Any = None) -> None:
        for option in sharding_options:
            for shard in option.shards:
                shard.perf = Perf(1.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize("given", [Twice(), [Twice()]])
def test_an_estimator_fills_in_other_costs(given: Any) -> None:
    told = {"t": ParameterConstraints(pooling_factors=[3.0])}
    space = EmbeddingEnumerator(MACHINES["cpu"], 64, told, given).enumerate(MODEL, [SHARDER])
    assert {cost_of(shard).total for option in space for shard in option.shards} == {2.0}
    assert {(option.name, *option.input_lengths) for option in space} == {("t", 3.0), ("u", 1.0)}


def test_what_a_callback_makes_of_the_winner_is_the_plan() -> None:
    def on_the_last_rank(options: Proposal) -> Proposal:
        for option in options:
            option.shards[0].rank = 3
        return options

    seen: list[Any] = []

    class Noted(NoopEmbeddingStats):
        def log(self, sharding_plan: ShardingPlan, topology: Topology, batch_size: int, **more: Any) -> None:
            seen.append((batch_size, sorted(more), len(more["best_plan"])))

    told = {name: ParameterConstraints(sharding_types=["table_wise"]) for name in "tu"}
    planner = EmbeddingShardingPlanner(
        MACHINES["cuda"], 64, constraints=told, callbacks=[on_the_last_rank], stats=Noted()
    )
    plan = planner.plan(MODEL, [SHARDER]).plan["ebc"]
    assert [plan[name].ranks for name in "tu"] == [[3], [3]]
    assert plan["t"].placement(plan["t"].shards[0]) == "rank:3/cuda:1"
    names = ["best_plan", "constraints", "enumerator", "num_plans", "num_proposals", "sharders"]
    assert seen == [(64, names, 2)]


@pytest.mark.parametrize("batch_size", [0, -1, 1.5])
def test_a_batch_has_an_example_at_least(batch_size: Any) -> None:
    with pytest.raises(ValueError, match=f"batch_size={batch_size} must be at least 1"):
        EmbeddingShardingPlanner(batch_size=batch_size)
    assert EmbeddingShardingPlanner(MACHINES["cpu"], 1).plan(MODEL, [SHARDER]).plan.keys() == {"ebc"}
    with pytest.raises(ValueError, match=r"plan_loader: plans are loaded by ShardingPlan\.from_json"):
        EmbeddingShardingPlanner(plan_loader=object())  # type: ignore[arg-type]


def test_planners_of_the_same_inputs_have_the_same_number() -> None:
    def number(batch_size: int = 8, ranks: int = 2, **told: Any) -> int:
        planner = EmbeddingShardingPlanner(Topology(ranks, "cpu"), batch_size, constraints=told)
        return planner.hash_planner_context_inputs()

    given = {"t": ParameterConstraints(), "u": ParameterConstraints(min_partition=8)}
    assert number(**given) == number(**dict(reversed(given.items())))
    assert len({number(), number(9), number(8, 3), number(**given), number(t=ParameterConstraints())}) == 5


def test_storage_fits_in_what_is_as_large_in_every_memory() -> None:
    room = Storage(2, 2, 2)
    for held in product((1, 2, 3), repeat=3):
        assert Storage(*held).fits_in(room) == (max(held) <= 2)
        total = Storage(*held) + room
        assert (total.hbm, total.ddr, total.ssd) == tuple(each + 2 for each in held)
        assert total - room == Storage(*held)


def test_figures_of_an_option_are_those_of_its_shards() -> None:
    option = way("t", "row_wise", [(1, 4.0), (2, 6.0)])
    assert option.total_storage == Storage(0, 3 << 30) and option.total_perf == 10.0
    bare = [Shard([1, 1], [0, 0])]
    option.shards += bare  # of which nothing is known yet
    assert option.total_storage == Storage(0, 3 << 30) and option.total_perf == 10.0
    for ask, what in [(bytes_of, "storage"), (cost_of, "perf")]:
        with pytest.raises(PlannerError, match=rf"a shard \[1, 1\] has no {what}; let an estimator fill it in"):
            ask(bare[0])
    some = Perf(1.0, 2.0, 4.0, 8.0, 16.0, 32.0)
    assert some.total == 47.0 and (some + Perf(1, 1, 1, 1, 1, 1)) == Perf(2, 3, 5, 9, 17, 33)
    same = way("t", "row_wise", [(1, 4.0), (2, 6.0)])
    same.shards += [Shard([1, 1], [0, 0])]
    assert option == same and option != way("t", "row_wise", [(1, 4.0)]) and option != hash(option)


def test_a_plan_is_rated_by_its_slowest_and_its_fullest_rank() -> None:
    option = way("t", "table_wise", [(0, 4.0), (0, 3.0), (0, 2.0)])
    for shard, (rank, held) in zip(option.shards, [(0, 1), (1, 5), (1, 1)], strict=True):
        shard.rank, shard.storage = rank, Storage(held, 0)
    topology = Topology(3, "cuda")
    assert (NoopPerfModel(topology).rate([option]), NoopStorageModel(topology).rate([option])) == (5.0, 6.0)
    option.shards[0].rank = 2
    assert NoopPerfModel(topology).rate([option, option]) == 10.0


def test_what_is_not_sharded_is_held_five_times() -> None:
    layer = nn.Linear(3, 2)
    model = nn.ModuleDict({"ebc": collection([table("t")]), "a": layer, "b": layer, "c": nn.Linear(1, 1).half()})
    assert dense_bytes(model, [SHARDER]) == 5 * (8 * 4 + 2 * 2)
    assert dense_bytes(model, []) == 5 * (8 * 4 + 2 * 2 + 1000 * 64 * 4)


class Outer(EmbeddingBagCollection):
    """A collection with one inside it."""

    def __init__(self) -> None:
        super().__init__([table("t")], device=torch.device("meta"))
        self.inner = collection([table("u")])


def test_what_is_inside_a_sharded_module_is_no_module_of_its_own() -> None:
    def paths(model: nn.Module) -> list[str]:
        return [found.path for found in find_tables(model, [SHARDER], "cpu")]

    assert paths(Outer()) == [""]
    assert paths(nn.ModuleDict({"a": Outer(), "ab": collection([table("u")]), "c": nn.Linear(1, 1)})) == ["a", "ab"]


def test_traffic_grows_with_the_world() -> None:
    larger = Topology(6, "cpu", local_world_size=3)
    (found,) = for_world([replace(TABLE, ranks=(1, 2))], TOPOLOGY, larger)
    assert (found.ids, found.bags, found.ranks) == (600.0, 300.0, (0, 1, 2, 3, 4, 5))


def facts_of(told: ParameterConstraints, features: int = 2) -> Any:
    names = [f"f{n}" for n in range(features)]
    found = find_tables(collection([table("t", 100, 64, names)]), [SHARDER], "cpu")
    return planner_tables(found, Topology(4, "cpu"), {"t": told}, 10)[0]


@pytest.mark.parametrize(
    ("told", "bags", "ids"),
    [
        ({}, 80, 80),
        ({"pooling_factors": [3.0]}, 80, 240),
        ({"pooling_factors": [3.0, 0.5]}, 80, 140),
        ({"num_poolings": [2.0, 1.0], "pooling_factors": [3.0, 0.5]}, 120, 260),
        ({"batch_sizes": [5, 1], "pooling_factors": [2.0, 3.0]}, 24, 52),
        ({"num_ids": [7.0, 1.0], "pooling_factors": [3.0]}, 80, 32),
        ({"num_ids": [0.0]}, 80, 0),
    ],
)
def test_traffic_of_all_ranks(told: dict[str, Any], bags: float, ids: float) -> None:
    """Two features, ten examples a rank, four ranks."""
    found = facts_of(ParameterConstraints(**told))
    assert (found.bags, found.ids, found.num_features) == (bags, ids, 2)


@pytest.mark.parametrize(
    ("told", "error"),
    [
        ({"pooling_factors": [-0.1]}, r"pooling_factors=\[-0.1\] must be finite and not negative"),
        ({"pooling_factors": [float("inf")]}, r"pooling_factors=\[inf\] must be finite"),
        ({"pooling_factors": [float("nan")]}, r"pooling_factors=\[nan\] must be finite"),
        ({"num_poolings": [1.0, 1.0, 1.0]}, "num_poolings has 3 numbers for 2 features"),
        ({"min_partition": 2}, "min_partition=2 must be a multiple of 4"),
        ({"min_partition": 0}, "min_partition=0 must be a multiple of 4"),
        ({"min_partition": 6}, "min_partition=6 must be a multiple of 4"),
        ({"device_group": [-1]}, r"device_group \[-1\] must name ranks of 0 .. 3"),
        ({"device_group": [4]}, r"device_group \[4\] must name ranks of 0 .. 3"),
        ({"sharding_types": ["data_parallel"], "device_group": [0, 1, 2]}, r"on cpu ranks \[0, 1, 2\]; what can run"),
    ],
)
def test_constraints_that_cannot_be_met(told: dict[str, Any], error: str) -> None:
    with pytest.raises(ValueError, match=f"table 't': .*{error}"):
        facts_of(ParameterConstraints(**told))


def test_constraints_that_can_just_be_met() -> None:
    assert facts_of(ParameterConstraints()).min_partition == 16 and not facts_of(ParameterConstraints()).weighted
    assert [facts_of(ParameterConstraints(min_partition=n)).min_partition for n in (4, 64)] == [4, 64]
    assert facts_of(ParameterConstraints(is_weighted=True)).weighted
    assert facts_of(ParameterConstraints(device_group=[3, 0, 3])).ranks == (0, 3)
    for everyone in ("cpu", range(4), None):
        found = facts_of(ParameterConstraints(device_group=everyone))
        assert found.ranks == (0, 1, 2, 3) and "data_parallel" in found.kernels
    assert set(found.kernels) == set(KINDS)


def test_only_pooled_row_blocks_hold_partial_sums() -> None:
    for pooled, kind, rows in [(True, "table_wise", 1000), (False, "row_wise", 250)]:
        facts = replace(TABLE, pooled=pooled)
        vectors = (200 if pooled else 400 * rows / 1000) * 8 * 4
        assert shard_storage(facts, kind, "fused", (rows, 8), TOPOLOGY).vectors == 2 * vectors
