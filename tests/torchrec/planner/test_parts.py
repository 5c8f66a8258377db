"""Parts that are passed to the planner."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from torch import nn

from rayrec.distributed import ShardingPlan
from rayrec.distributed.planner.search.options import options
from rayrec.distributed.planner.tables.from_model import find_tables, planner_tables
from rayrec.torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from rayrec.torchrec.distributed.planner.bases import ShardEstimator
from rayrec.torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from rayrec.torchrec.distributed.planner.parts import Perf, PlannerError, Proposal, Shard, Storage, bytes_of, cost_of
from rayrec.torchrec.distributed.planner.perf_models import NoopPerfModel, NoopStorageModel
from rayrec.torchrec.distributed.planner.stats import NoopEmbeddingStats
from tests.planner.problems import SHARDER, collection, table
from tests.torchrec.planner.test_proposals import way

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
    with pytest.raises(ValueError, match=r"plan_loader is not supported; load a plan with ShardingPlan\.from_json"):
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
        with pytest.raises(PlannerError, match=rf"shard of size \[1, 1\] has no {what}; set it with an estimator"):
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
